"use strict";
// Buttons in the heads of tables with the class `sorts` order the rows; cells without a value stay last.
for (const table of document.querySelectorAll("table.sorts")) {
  const heads = [...table.tHead.rows[0].cells];
  const value = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent;
  const order = (head, column) => {
    const down = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    const isNumber = head.classList.contains("number");
    const compare = (a, b) => {
      const [left, right] = [value(a, column), value(b, column)];
      if (left === "" || right === "") return (left === "") - (right === "");
      return down * (isNumber ? left - right : left.localeCompare(right, undefined, { numeric: true }));
    };
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down === 1 ? "ascending" : "descending");
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort(compare));
  };
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => order(head, column)));
}
