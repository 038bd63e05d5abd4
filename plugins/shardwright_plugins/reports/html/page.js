// Sorting and searching the tables. Without scripts the page lacks only these.
"use strict";

function value(row, column) {
  const cell = row.cells[column];
  return cell.dataset.v === undefined ? cell.textContent : Number(cell.dataset.v);
}

function compare(a, b) {
  return typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true });
}

function makeSortable(table) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const numbers = head.classList.contains("n");
      const before = head.getAttribute("aria-sort");
      const rising = before === null ? !numbers : before === "descending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", rising ? "ascending" : "descending");
      const sign = rising ? 1 : -1;
      const rows = [...body.rows].map((row) => [value(row, column), row]);
      rows.sort((a, b) => sign * compare(a[0], b[0]));
      body.append(...rows.map((pair) => pair[1]));
    });
  });
}

function makeSearchable(table) {
  const rows = [...table.tBodies[0].rows].map((row) => [row.textContent.toLowerCase(), row]);
  const find = document.createElement("div"), box = document.createElement("input"), count = document.createElement("small");
  find.className = "find";
  box.type = "search";
  box.placeholder = `Search ${rows.length.toLocaleString("en")} rows`;
  box.setAttribute("aria-label", box.placeholder);
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const [text, row] of rows) {
      row.hidden = !words.every((word) => text.includes(word));
      shown += !row.hidden;
    }
    count.textContent = words.length ? `${shown.toLocaleString("en")} found` : "";
  });
  find.append(box, count);
  table.closest(".scroll").before(find);
}

for (const table of document.querySelectorAll("table.sortable")) {
  makeSortable(table);
  if (table.tBodies[0].rows.length > 10) makeSearchable(table);
}
