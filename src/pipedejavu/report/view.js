// The visible time interval, shared by all charts, as fractions of the whole from 0 to 1; and the gestures and
// keys that change it. Charts observe the view; it does not know what they draw.

const GLIDE_MS = 160;

class View {
  constructor(data) {
    this.seconds = data.span_s;
    this.home = [0, Math.min(1, data.drawn_s / data.span_s) || 1];
    const lengths = data.workers.flatMap((w) => w.lanes.flatMap((l) => l.bars.map((b) => b[3] - b[2])));
    const shortest = lengths.reduce((least, length) => Math.min(least, length), data.span_s);
    this.narrowest = Math.min(1, Math.max(1e-5, (shortest / data.span_s) * 4));
    [this.from, this.to] = this.home;
    this.pinned = "";
    this.watchers = [];
    this.frame = 0;
  }

  get span() { return this.to - this.from; }

  /** The time in seconds at a fraction of the visible interval. */
  timeAt(share) { return (this.from + this.span * share) * this.seconds; }

  watch(redraw) { this.watchers.push(redraw); }

  draw() { for (const redraw of this.watchers) redraw(this); }

  /** Schedules one redraw before the next frame, however often it is called. */
  refresh() {
    if (!this.frame) this.frame = requestAnimationFrame(() => { this.frame = 0; this.draw(); });
  }

  show(from, to) {
    const span = Math.min(1, Math.max(this.narrowest, to - from));
    this.from = Math.min(Math.max(0, from), 1 - span);
    this.to = this.from + span;
    this.refresh();
    clearTimeout(this.saving);
    this.saving = setTimeout(() => this.writeHash(), 200);
  }

  /** Scales the visible interval by `factor` around a fraction of it. */
  zoom(factor, centre = 0.5) {
    const span = Math.min(1, Math.max(this.narrowest, this.span * factor));
    const from = this.from + (this.span - span) * centre;
    this.show(from, from + span);
  }

  pan(share) { this.show(this.from + this.span * share, this.to + this.span * share); }

  /** Moves to an interval in a few frames, or at once if the reader prefers reduced motion. */
  glide(from, to) {
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) { this.show(from, to); return; }
    const [oldFrom, oldTo, began] = [this.from, this.to, performance.now()];
    const step = (now) => {
      const part = Math.min(1, Math.max(0, (now - began) / GLIDE_MS));
      const ease = part * (2 - part);
      this.show(oldFrom + (from - oldFrom) * ease, oldTo + (to - oldTo) * ease);
      if (part < 1) requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  }

  glideZoom(factor) {
    const span = Math.min(1, Math.max(this.narrowest, this.span * factor));
    const from = Math.min(Math.max(0, (this.from + this.to - span) / 2), 1 - span);
    this.glide(from, from + span);
  }

  get isHome() { return Math.abs(this.from - this.home[0]) + Math.abs(this.to - this.home[1]) < 1e-9; }

  /** Resets the view: to all that is drawn, and from there to the whole time. */
  glideHome() { this.glide(...(this.isHome ? [0, 1] : this.home)); }

  /** Reads the visible interval and the pinned action from a URL such as "#zoom=0.2,0.4&action=F2.5@0". */
  readHash() {
    const parts = new URLSearchParams(location.hash.slice(1));
    const [from, to] = (parts.get("zoom") ?? "").split(",").map(Number);
    this.pinned = parts.get("action") ?? "";
    if (to > from) this.show(from, to);
  }

  writeHash() {
    const parts = [];
    if (!this.isHome) parts.push(`zoom=${shortNumber(this.from, 6)},${shortNumber(this.to, 6)}`);
    if (this.pinned) parts.push(`action=${encodeURIComponent(this.pinned)}`);
    try {
      history.replaceState(null, "", `#${parts.join("&")}`);
    } catch { /* a page inside a frame may not change its address; the view itself works */ }
  }
}

/** Makes wheel, drag, pinch and keys over `element` change the view; `box()` is the plot's left and width. */
function addGestures(element, view, box) {
  const share = (x) => { const { left, width } = box(); return (x - left) / width; };
  const fingers = new Map();
  let scrolledAt = -1e9;
  let dragged = 0;
  // A wheel movement that starts by scrolling the page keeps scrolling it over the chart.
  addEventListener("scroll", () => { scrolledAt = performance.now(); }, { passive: true });

  element.addEventListener("wheel", (event) => {
    const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
    if (Math.abs(sideways) > Math.abs(event.shiftKey ? 0 : event.deltaY)) {
      if (view.span < 1) { event.preventDefault(); view.pan(sideways / box().width); }
      return;
    }
    const isOutside = share(event.clientX) < 0;
    const isScrolling = !event.ctrlKey && performance.now() - scrolledAt < 250;
    const isSpent = !event.ctrlKey && event.deltaY > 0 && view.span >= 1;
    if (isOutside || isScrolling || isSpent) return;
    event.preventDefault();
    const lines = event.deltaMode === 1 ? 16 : 1;
    view.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY * lines * 0.002))), share(event.clientX));
  }, { passive: false });

  element.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || event.target.closest("button") || share(event.clientX) < 0) return;
    fingers.set(event.pointerId, event.clientX);
    if (fingers.size === 1) dragged = 0;
  });
  addEventListener("pointermove", (event) => {
    const old = fingers.get(event.pointerId);
    if (old === undefined) return;
    fingers.set(event.pointerId, event.clientX);
    dragged += Math.abs(event.clientX - old);
    const other = [...fingers].find(([id]) => id !== event.pointerId);
    if (other) pinch(view, share(old), share(event.clientX), share(other[1]));
    else if (dragged > 3) view.pan((old - event.clientX) / box().width);
    element.classList.toggle("dragging", dragged > 3);
  });
  const release = (event) => {
    fingers.delete(event.pointerId);
    if (!fingers.size) element.classList.remove("dragging");
  };
  addEventListener("pointerup", release);
  addEventListener("pointercancel", release);
  // The click that ends a drag is not a click on a bar.
  element.addEventListener("click", (event) => { if (dragged > 3) event.stopImmediatePropagation(); }, true);

  const keys = {
    "+": () => view.glideZoom(0.5), "=": () => view.glideZoom(0.5), "-": () => view.glideZoom(2),
    ArrowLeft: () => view.pan(-0.2), ArrowRight: () => view.pan(0.2),
    0: () => view.glideHome(), Home: () => view.glideHome(),
  };
  element.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
}

/** Keeps the times under two fingers in place when one finger moves from `old` to `now` and `other` stays. */
function pinch(view, old, now, other) {
  const gap = now - other;
  if (Math.abs(gap) < 0.01) return;
  const span = Math.min(1, view.span * Math.abs((old - other) / gap));
  const from = view.from + view.span * other - span * other;
  view.show(from, from + span);
}
