// Memory in use over time: one chart per worker and memory, with stacked classes and a marked peak.

const CHART_HEIGHT = 84;
const SHOWN_WORKERS = 8;

class Memory {
  constructor(element, data, view, tip) {
    Object.assign(this, { view, tip, classes: data.classes });
    if (!data.memory.length) {
      const reason = "This timeline says nothing about memory, so there is no chart.";
      element.append(make("p", { class: "hint" }, reason));
      return;
    }
    const legend = document.getElementById("classes");
    for (const name of this.classes) {
      legend.append(make("span", {}, make("i", { class: "swatch", "data-class": name }), name));
    }
    this.panel = new Panel(element, "Memory", view);
    this.charts = data.memory.map((curve) => new MemoryChart(this, curve));
    const hasCapacity = this.charts.some((chart) => chart.isNear);
    for (const name of hasCapacity ? ["capacity", "peak"] : ["peak"]) {
      legend.append(make("span", {}, make("i", { class: `swatch ${name}-swatch` }), name));
    }
    this.panel.rows.append(...this.charts.map((chart) => chart.element));
    this.addToggle(element, legend);
    view.watch(() => this.draw());
  }

  /** Shows only the fullest workers if there are many; a button shows the others. */
  addToggle(element, legend) {
    const workers = [...new Set(this.charts.map((chart) => chart.curve.number))];
    if (workers.length <= SHOWN_WORKERS) return;
    const shown = new Set(workers.slice(0, SHOWN_WORKERS));
    const rest = this.charts.filter((chart) => !shown.has(chart.curve.number));
    for (const chart of rest) chart.element.hidden = true;
    legend.append(make("span", { class: "hint" }, "Fullest first."));
    const toggle = button(`Show all ${workers.length} workers`, "Show or hide the less full workers", () => {
      const isHidden = !rest[0].element.hidden;
      for (const chart of rest) chart.element.hidden = isHidden;
      toggle.textContent = isHidden ? `Show all ${workers.length} workers` : `Show the ${SHOWN_WORKERS} fullest`;
      toggle.setAttribute("aria-expanded", !isHidden);
      this.draw();
    });
    toggle.removeAttribute("aria-label");
    toggle.setAttribute("aria-expanded", "false");
    element.append(make("div", { class: "more" }, toggle));
  }

  draw() {
    const transform = this.panel.transform;
    for (const chart of this.charts) if (!chart.element.hidden) chart.draw(transform);
  }
}

class MemoryChart {
  constructor(memory, curve) {
    Object.assign(this, { memory, curve });
    this.isNear = curve.capacity > 0 && curve.capacity <= 1.6 * curve.peak; // else the line is out of sight
    this.top = Math.max(curve.peak, this.isNear ? curve.capacity : 0) * 1.06;
    this.areas = draw("g");
    this.mark = draw("circle", { class: "mark", r: 3.5, cy: this.y(curve.peak) });
    this.svg = draw("svg", { class: "plot", height: CHART_HEIGHT, role: "img",
      "aria-label": `${curve.worker}, ${curve.memory} memory over time, peak ${formatSize(curve.peak)}` }, this.areas);
    if (this.isNear) {
      const y = this.y(curve.capacity);
      this.svg.append(draw("line", { class: "capacity", x2: "100%", y1: y, y2: y }));
    }
    this.svg.append(this.mark);
    this.element = make("div", { class: "worker memory" }, this.name(), this.scale(), this.svg);
    this.svg.addEventListener("pointermove", (event) => this.explain(event));
    this.svg.addEventListener("pointerdown", (event) => this.explain(event));
    this.svg.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") memory.tip.hide(); });
    this.stack();
  }

  y(bytes) { return CHART_HEIGHT - (bytes / this.top) * CHART_HEIGHT; }

  name() {
    const { curve } = this;
    const isOver = curve.capacity > 0 && curve.peak > curve.capacity;
    const capacity = curve.capacity ? [make("span", {}, `of ${formatSize(curve.capacity)}`)] : [];
    return make("div", { class: "name" }, make("b", {}, curve.worker),
      make("span", { title: curve.device }, curve.memory === "host" ? "host memory" : curve.device),
      make("span", { class: `figure ${isOver ? "over" : ""}` }, `peak ${formatSize(curve.peak)}`), ...capacity);
  }

  scale() {
    const column = make("div", { class: "lanes" });
    for (const [bytes, text] of ticks(0, this.top, 3, SIZE_UNITS)) {
      const label = make("span", {}, bytes ? text : "0");
      label.style.top = `${Math.min(Math.max(this.y(bytes) - 6, 0), CHART_HEIGHT - 12)}px`;
      column.append(label);
    }
    return column;
  }

  /** Draws each class as an area of steps on top of the classes before it. */
  stack() {
    const { times, sizes } = this.curve;
    const { seconds } = this.memory.view;
    const ends = [...times.slice(1), seconds];
    let floor = times.map(() => 0);
    for (const name of this.memory.classes.filter((key) => sizes[key])) {
      const ceiling = floor.map((bytes, i) => bytes + sizes[name][i]);
      const edge = (values, i, isBack) => {
        const [x0, x1] = [times[i], ends[i]].map((time) => ((time / seconds) * 1000).toFixed(4));
        const y = this.y(values[i]).toFixed(2);
        return isBack ? `${x1} ${y}L${x0} ${y}` : `${x0} ${y}L${x1} ${y}`;
      };
      const over = times.map((_, i) => edge(ceiling, i, false));
      const back = times.map((_, i) => edge(floor, i, true)).reverse();
      this.areas.append(draw("path", { d: `M${over.join("L")}L${back.join("L")}Z`, "data-class": name }));
      floor = ceiling;
    }
  }

  draw(transform) {
    this.areas.setAttribute("transform", transform);
    this.mark.setAttribute("cx", this.memory.panel.pixel(this.curve.peak_s));
  }

  explain(event) {
    const { view, tip, panel, classes } = this.memory;
    if (tip.isPinned || panel.element.classList.contains("dragging")) return;
    const { left, width } = this.svg.getBoundingClientRect();
    const time = view.timeAt((event.clientX - left) / width);
    const { times, sizes } = this.curve;
    const after = times.findIndex((t) => t > time);
    const at = (after < 0 ? times.length : after) - 1;
    if (at < 0) { tip.hide(); return; }
    const rows = classes.filter((name) => sizes[name]?.[at]).map((name) => [name, formatSize(sizes[name][at]), name]);
    const total = classes.reduce((sum, name) => sum + (sizes[name]?.[at] ?? 0), 0);
    tip.show(event.clientX, event.clientY, `${formatSize(total)} at ${formatTime(time)}`,
      `${this.curve.worker}, ${this.curve.memory} memory`, rows.reverse());
  }
}
