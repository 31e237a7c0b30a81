// Point at a chart: the values of all its lines at the nearest step. The lines are drawn in their own numbers.
const tip = document.createElement("div");
tip.className = "tip";
document.body.append(tip);

function pointsOf(path) {
  return [...path.getAttribute("d").matchAll(/[ML]([^ ]+) ([^MLh]+)/g)].map(([, x, y]) => [+x, +y]);
}

function nearest(points, x) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle; else high = middle;
  }
  return Math.abs(points[low][0] - x) <= Math.abs(points[high][0] - x) ? points[low] : points[high];
}

function shown(value) {
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e7) ? value.toExponential(3) : value.toLocaleString("en", {
    maximumSignificantDigits: size >= 1000 ? Math.ceil(Math.log10(size)) : size > 0.9 && size < 1 ? 6 : 4
  });
}

for (const chart of document.querySelectorAll("svg[data-matrix]")) {
  const [sx, , , , tx] = chart.dataset.matrix.split(" ").map(Number);
  const lines = [...chart.querySelectorAll("path[data-name]")].map(path => ({path, points: pointsOf(path)}));
  const cursor = chart.querySelector(".cursor");
  const [width, height] = chart.getAttribute("viewBox").split(" ").slice(2).map(Number);

  function show(event) {
    const place = new DOMPoint(event.clientX, event.clientY).matrixTransform(chart.getScreenCTM().inverse());
    const wanted = (place.x - tx) / sx;
    const found = lines.map(line => ({...line, point: nearest(line.points, wanted)}));
    const at = found.map(line => line.point[0]).reduce((a, b) => Math.abs(a - wanted) <= Math.abs(b - wanted) ? a : b);
    const rows = found.filter(line => Math.abs(line.point[0] - at) * sx < 4).map(({path, point}) => {
      const row = document.createElement("div");
      row.className = "key c" + path.getAttribute("class").match(/c(\d)/)[1];
      const value = chart.dataset.log === "1" ? 10 ** point[1] : point[1];
      row.append(path.dataset.name + " ", Object.assign(document.createElement("i"), {textContent: shown(value)}));
      return row;
    });
    const head = Object.assign(document.createElement("b"), {textContent: at.toLocaleString("en") + " " + chart.dataset.x});
    tip.replaceChildren(head, ...rows);
    tip.style.display = "block";
    const right = event.clientX > innerWidth - 220;
    tip.style.left = event.pageX + (right ? -tip.offsetWidth - 14 : 14) + "px";
    tip.style.top = event.pageY + 14 + "px";
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, at * sx + tx);
    cursor.style.display = "inline";
  }
  function hide() { tip.style.display = cursor.style.display = "none"; }
  chart.addEventListener("pointermove", show);
  chart.addEventListener("pointerdown", show);
  chart.addEventListener("pointerleave", hide);
}
