// The page is complete without this script; it adds reading values with the pointer and arrow keys between the points.
(() => {
  "use strict";
  const root = document.documentElement;
  root.classList.add("js");
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => { d.open = true; }));
  const chart = document.getElementById("timeline");
  if (!chart) return;
  const points = JSON.parse(document.getElementById("points").textContent);
  const readout = document.getElementById("readout");
  const cursor = chart.querySelector(".cursor");
  const marks = [...chart.querySelectorAll(".mark")];
  const atRest = readout.textContent;

  const show = (x, text) => {
    cursor.setAttribute("x1", `${x}%`);
    cursor.setAttribute("x2", `${x}%`);
    cursor.style.visibility = "visible";
    readout.textContent = text;
  };
  const rest = () => {
    const focused = document.activeElement;
    if (marks.includes(focused)) return show(focused.dataset.x, focused.getAttribute("aria-label"));
    cursor.style.visibility = "hidden";
    readout.textContent = atRest;
  };

  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * 100;
    // The last point at or before the pointer: memory stays as it is until the next event.
    let low = 0;
    for (let high = points.length - 1; low < high;) {
      const middle = (low + high + 1) >> 1;
      if (points[middle][0] <= x) low = middle; else high = middle - 1;
    }
    show(points[low][0], points[low][1]);
  });
  chart.addEventListener("pointerleave", rest);
  chart.addEventListener("focusin", rest);
  chart.addEventListener("focusout", rest);

  // One stop for the Tab key; arrows, Home and End move between the points.
  const enter = (mark) => marks.forEach((other) => other.setAttribute("tabindex", other === mark ? "0" : "-1"));
  enter(chart.querySelector(".mark.peak") || marks[0]);
  chart.addEventListener("keydown", (event) => {
    const at = marks.indexOf(document.activeElement);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: marks.length - 1 }[event.key];
    if (at < 0 || to === undefined || !marks[to]) return;
    event.preventDefault();
    enter(marks[to]);
    marks[to].focus();
    rest(); // A window in the background gets no focus events.
  });
})();
