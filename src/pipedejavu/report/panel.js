// The panel that both charts share: a time axis that stays visible, with zoom buttons; tick lines through all
// rows; a line that follows the pointer; and a column of rows.

class Panel {
  constructor(element, name, view) {
    this.view = view;
    this.width = 1; // pixels of the plot, as of the last drawing
    this.axis = draw("svg", { class: "axis", "aria-hidden": "true" });
    this.grid = draw("svg", { class: "grid", "aria-hidden": "true" });
    this.lines = draw("g");
    this.cursor = draw("line", { class: "cursor", y2: "100%", visibility: "hidden" });
    this.grid.append(this.lines, this.cursor);
    this.rows = make("div", { class: "rows" }, this.grid);
    const buttons = make("div", { class: "zoom" },
      button("−", "Zoom out", () => view.glideZoom(2)),
      button("+", "Zoom in", () => view.glideZoom(0.5)),
      button("Reset", "Show everything", () => view.glideHome()));
    this.element = make("div", { class: "panel", tabindex: "0", role: "group",
      "aria-label": `${name}: plus and minus zoom, arrows pan, 0 shows everything` },
      make("div", { class: "ruler" }, buttons, this.axis), this.rows);
    element.append(this.element);
    addGestures(this.element, view, () => this.axis.getBoundingClientRect());
    this.element.addEventListener("pointermove", (event) => this.follow(event));
    this.element.addEventListener("pointerleave", () => this.cursor.setAttribute("visibility", "hidden"));
    view.watch(() => this.draw());
  }

  /** The transform from thousandths of the whole time to pixels of the visible interval. */
  get transform() {
    const scale = this.width / (1000 * this.view.span);
    return `matrix(${scale} 0 0 1 ${-this.view.from * 1000 * scale} 0)`;
  }

  pixel(seconds) { return ((seconds / this.view.seconds - this.view.from) / this.view.span) * this.width; }

  draw() {
    const width = (this.width = this.axis.clientWidth || 1);
    const marks = ticks(this.view.timeAt(0), this.view.timeAt(1), width / (width < 500 ? 70 : 110), TIME_UNITS);
    const texts = [];
    const lines = [];
    let free = 0;
    for (const [seconds, text] of marks) {
      const x = Math.round(this.pixel(seconds)) + 0.5;
      lines.push(draw("line", { x1: x, x2: x, y2: "100%" }));
      texts.push(draw("line", { x1: x, x2: x, y1: 18, y2: 24 }));
      const half = text.length * 3.2;
      const middle = Math.min(Math.max(x, half), width - half);
      if (middle - half < free) continue;
      texts.push(draw("text", { x: middle, y: 13, "text-anchor": "middle" }, text));
      free = middle + half + 8;
    }
    this.axis.replaceChildren(...texts);
    this.lines.replaceChildren(...lines);
  }

  follow(event) {
    const x = event.clientX - this.axis.getBoundingClientRect().left;
    const isInside = event.pointerType === "mouse" && x >= 0 && x <= this.width;
    this.cursor.setAttribute("visibility", isInside ? "visible" : "hidden");
    this.cursor.setAttribute("x1", x);
    this.cursor.setAttribute("x2", x);
  }
}
