// The timeline: for each worker a tall compute lane and thin other lanes. A bar is a rect in units of time;
// zooming only changes one transform per worker. Text inside bars is drawn anew, in pixels, for each view.

const THIN = 11;
const GAP = 2;
const FOLD_ABOVE = 2;

class Gantt {
  constructor(element, data, view, tip) {
    Object.assign(this, { data, view, tip, bars: new Map(), hidden: new Set(), pinned: null });
    this.tall = data.workers.length > 24 ? 18 : 24;
    this.isCrowded = data.workers.some((worker) => countNetwork(worker) > FOLD_ABOVE);
    const lengths = data.workers.flatMap((w) => w.lanes[0].bars.map((bar) => bar[3] - bar[2]));
    this.typical_s = lengths.sort((a, b) => a - b)[Math.floor(lengths.length / 2)] ?? 0;
    this.panel = new Panel(element, "Timeline", view);
    this.rows = data.workers.map((worker) => new WorkerRow(this, worker));
    this.panel.rows.append(...this.rows.map((row) => row.element));
    this.addLegend(document.getElementById("kinds"));
    this.addNotes(element);
    this.listen();
    view.watch(() => this.draw());
    this.isLarge = data.workers.length > 32;
    if (this.isLarge) addEventListener("scroll", () => this.drawLabels(), { passive: true });
  }

  addLegend(legend) {
    for (const [kind, name] of this.data.kinds) {
      const text = name === "other" || kind.length === 1 ? `${kind} ${name}` : name;
      const entry = make("button", { type: "button", "data-kind": kind, "aria-pressed": "true" },
        make("i", { class: "swatch" }), text);
      entry.addEventListener("click", () => this.toggleKind(kind, entry));
      legend.append(entry);
    }
    if (this.data.workers.some((worker) => worker.num_shades > 1)) {
      legend.append(make("span", { class: "hint" }, "Lighter shades: further pieces of the same worker."));
    }
    const foldable = this.rows.filter((row) => row.isFoldable);
    if (!foldable.length) return;
    const entry = make("button", { type: "button", class: "plain", "aria-pressed": "false" },
      "All network lanes");
    entry.addEventListener("click", () => {
      const isOpen = entry.getAttribute("aria-pressed") === "false";
      entry.setAttribute("aria-pressed", isOpen);
      for (const row of foldable) row.fold(!isOpen);
    });
    legend.append(entry);
  }

  addNotes(element) {
    const { num_actions: total, num_drawn: drawn, drawn_s: until } = this.data;
    const left = (total - drawn).toLocaleString("en");
    const text = !total ? "No action of this timeline takes any time, so there is nothing to draw."
      : `${left} of ${total.toLocaleString("en")} actions are not drawn: those that start after ${formatTime(until)}.`;
    this.panel.element.hidden = !total;
    if (drawn < total || !total) element.prepend(make("p", { class: "note" }, text));
  }

  toggleKind(kind, entry) {
    const isShown = this.hidden.delete(kind);
    if (!isShown) this.hidden.add(kind);
    entry.setAttribute("aria-pressed", isShown);
    for (const [rect, bar] of this.bars) if (bar.kind === kind) rect.classList.toggle("off", !isShown);
    this.drawLabels();
  }

  listen() {
    const { element } = this.panel;
    element.addEventListener("pointermove", (event) => {
      if (this.tip.isPinned || event.pointerType === "touch") return;
      const bar = this.bars.get(event.target);
      if (bar && !element.classList.contains("dragging")) this.showTip(bar, event.clientX, event.clientY);
      else this.tip.hide();
    });
    element.addEventListener("pointerleave", () => this.tip.hide());
    addEventListener("click", (event) => {
      const bar = this.bars.get(event.target);
      if (bar) this.pin(bar, event.clientX, event.clientY);
      else if (this.tip.isPinned && !this.tip.element.contains(event.target)) this.tip.unpin();
    });
    this.tip.onUnpin = () => this.mark(null);
  }

  showTip(bar, x, y) {
    this.tip.show(x, y, this.data.names[bar.action], `${bar.worker.name} ${this.data.words[bar.action]}.`, [
      [this.data.action_title ?? "in the program", bar.action],
      ["start", formatTime(bar.start, 6)], ["end", formatTime(bar.end, 6)],
      ["duration", formatTime(bar.end - bar.start)], ["lane", bar.lane]]);
  }

  pin(bar, x, y) {
    this.mark(bar);
    this.showTip(bar, x, y);
    this.tip.isPinned = true;
  }

  mark(bar) {
    this.pinned?.rect.classList.remove("pinned");
    bar?.rect.classList.add("pinned");
    this.pinned = bar;
    this.view.pinned = bar?.action ?? "";
    this.view.writeHash();
  }

  /** Opens the details of the action in the page's URL. */
  pinFromHash() {
    const bar = [...this.bars.values()].find((candidate) => candidate.action === this.view.pinned);
    if (!bar) return;
    const isLow = bar.rect.getBoundingClientRect().bottom > innerHeight * 0.7;
    if (isLow) bar.rect.closest(".worker").scrollIntoView({ block: "center" });
    const box = bar.rect.getBoundingClientRect();
    const { left } = this.panel.axis.getBoundingClientRect();
    this.pin(bar, Math.max(left, box.left), box.bottom - 10);
  }

  draw() {
    const typical = this.panel.pixel(this.typical_s) - this.panel.pixel(0);
    this.panel.element.classList.toggle("dense", typical < 8);
    this.panel.element.classList.toggle("packed", typical < 2);
    const transform = this.panel.transform;
    for (const row of this.rows) row.time.setAttribute("transform", transform);
    this.drawLabels();
  }

  /** Draws the text inside bars; with very many rows, only for visible ones. */
  drawLabels() {
    const inSight = this.isLarge ? this.rows.filter((row) => row.isInSight) : this.rows;
    for (const row of inSight) row.drawLabels();
  }
}

/** The transform of a lane in the row at `y`; lanes that share a row take half of its height each. */
function placeInRow(lane, y, isShared) {
  const direction = isShared ? lane.name[3] : "";
  if (direction === ">") return `translate(0 ${y}) scale(1 0.45)`;
  if (direction === "<") return `translate(0 ${y + THIN / 2}) scale(1 0.45)`;
  return `translate(0 ${y})`;
}

function countNetwork(worker) { return worker.lanes.filter((lane) => lane.role === "net").length; }

/** One worker: its name, the names of its lanes, and its bars. */
class WorkerRow {
  constructor(gantt, worker) {
    Object.assign(this, { gantt, worker, groups: [], labelled: [] });
    this.isFoldable = gantt.isCrowded && countNetwork(worker) > 1;
    this.time = draw("g");
    const track = draw("rect", { class: "track", width: "100%", height: gantt.tall });
    this.labels = draw("g", { class: "labels" });
    this.svg = draw("svg", { class: "plot", role: "img", "aria-label": `${worker.name}, its actions over time` },
      track, this.time, this.labels);
    this.lanes = make("div", { class: "lanes" });
    const copies = worker.copies > 1 ? [make("em", {}, ` ×${worker.copies}`)] : [];
    const others = worker.copies > 1 ? ` and ${worker.copies - 1} like it` : "";
    const device = make("span", { title: worker.device + others }, worker.device, ...copies);
    this.element = make("div", { class: "worker" },
      make("div", { class: "name" }, make("b", {}, worker.name), device), this.lanes, this.svg);
    for (const lane of worker.lanes) this.addLane(lane);
    this.fold(this.isFoldable);
  }

  addLane(lane) {
    const height = lane.role === "compute" ? this.gantt.tall : THIN;
    const group = draw("g", { class: `lane ${lane.role}` });
    const place = { lane, group, height, y: 0 };
    for (const [action, kind, start, end, text, shade] of lane.bars) {
      const unit = 1000 / this.gantt.view.seconds;
      const rect = draw("rect", { class: `bar s${shade}`, "data-action": action, "data-kind": kind,
        x: start * unit, width: (end - start) * unit, height });
      const bar = { rect, action, kind, start, end, text, worker: this.worker, lane: lane.name, place };
      this.gantt.bars.set(rect, bar);
      if (lane.role === "compute") this.labelled.push(bar);
      group.append(rect);
    }
    this.groups.push(place);
    this.time.append(group);
  }

  /** Lays the lanes out; folded, all network lanes share one row: sends above, receives below. */
  fold(isFolded) {
    const network = this.groups.filter(({ lane }) => lane.role === "net");
    const alone = isFolded ? this.groups.filter((group) => !network.includes(group)) : this.groups;
    const rows = [...alone.map((group) => [group]), ...(isFolded ? [network] : [])];
    const names = [];
    let y = 0;
    for (const row of rows) {
      const isShared = row.length > 1;
      for (const place of row) {
        place.group.setAttribute("transform", placeInRow(place.lane, y, isShared));
        place.y = y;
      }
      const [{ lane, height }] = row;
      const isFirst = this.isFoldable && lane === network[0].lane;
      const name = isFirst ? this.foldButton(isFolded, lane.name) : make("span", {}, lane.name);
      name.style.height = name.style.lineHeight = `${height}px`;
      names.push(name);
      y += height + GAP;
    }
    this.lanes.replaceChildren(...(names.length > 1 ? names : []));
    this.svg.setAttribute("height", y);
  }

  foldButton(isFolded, name) {
    const text = isFolded ? `net ×${countNetwork(this.worker)} ▸` : `${name} ▾`;
    const label = isFolded ? "Show each network lane" : "Show the network lanes as one";
    const made = button(text, label, () => {
      this.fold(!isFolded);
      this.lanes.querySelector("button").focus();
    });
    made.setAttribute("aria-expanded", !isFolded);
    return made;
  }

  get isInSight() {
    const { top, bottom } = this.element.getBoundingClientRect();
    return bottom > 0 && top < innerHeight;
  }

  drawLabels() {
    const { panel, hidden, tall } = this.gantt;
    const found = [];
    for (const bar of this.labelled) {
      const left = Math.max(0, panel.pixel(bar.start));
      const width = Math.min(panel.width, panel.pixel(bar.end)) - left;
      if (width < 9 || hidden.has(bar.kind)) continue;
      const { names, kinds } = this.gantt.data;
      const kind = kinds.find(([known]) => known === bar.kind)[1];
      const short = isNaN(bar.text) ? kind : `${kind} ${bar.text}`;
      const text = [names[bar.action], short, bar.text, bar.text[0]].find((option, i) =>
        option.length * 6.6 + [10, 10, 3, 3][i] <= width && (i < 3 || isNaN(bar.text)));
      if (text) found.push(draw("text", { x: left + width / 2, y: bar.place.y + tall / 2 + 4 }, text));
    }
    this.labels.replaceChildren(...found);
  }
}
