
"use strict";
// A click on a column's head sorts its table, and a second one turns the order around.
for (const head of document.querySelectorAll("thead th")) {
  head.firstElementChild.addEventListener("click", () => {
    const table = head.closest("table"), column = head.cellIndex;
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = row => {
      const cell = row.cells[column], number = cell.dataset.value;
      return number === undefined ? cell.textContent : Number(number);
    };
    const compare = (a, b) => {
      const [x, y] = [value(a), value(b)];
      if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1;  // gaps come last
      const order = typeof x === "number" ? x - y : x.localeCompare(y, "en", { numeric: true });
      return down ? -order : order;
    };
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort(compare));
  });
}
// Nothing stays folded on paper.
addEventListener("beforeprint", () => {
  for (const part of document.querySelectorAll("details")) part.open = true;
});
