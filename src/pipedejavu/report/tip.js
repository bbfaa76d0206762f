// The tooltip: a title, a sentence, and a few named values beside the pointer. It follows the pointer, or
// stays with a bar that was clicked until something else is clicked or Escape is pressed.

class Tip {
  constructor(element) {
    this.element = element;
    this.isPinned = false;
    addEventListener("keydown", (event) => { if (event.key === "Escape" && !element.hidden) this.unpin(); });
    addEventListener("pointerdown", (event) => { if (!event.target.closest(".plot")) this.hide(); });
  }

  /** Shows content near a point of the window; `rows` are [name, value, memory class or none]. */
  show(x, y, title, sentence, rows) {
    const list = make("dl", {}, ...rows.flatMap(([name, value, swatch]) => [
      make("dt", swatch ? { "data-class": swatch } : {}, name), make("dd", {}, value)]));
    const head = make("strong", {}, title);
    this.element.replaceChildren(head, ...(sentence ? [make("p", {}, sentence)] : []), list);
    this.element.hidden = false;
    this.element.style.left = this.element.style.top = "0"; // measured at the corner, where it has its full width
    const { width, height } = this.element.getBoundingClientRect();
    const left = Math.min(Math.max(8, x + 14), innerWidth - width - 8);
    const above = y - height - 14;
    this.element.style.left = `${left}px`;
    this.element.style.top = `${y + 18 + height > innerHeight && above > 8 ? above : y + 18}px`;
  }

  hide() { if (!this.isPinned) this.element.hidden = true; }

  unpin() {
    this.isPinned = false;
    this.element.hidden = true;
    this.onUnpin?.();
  }
}
