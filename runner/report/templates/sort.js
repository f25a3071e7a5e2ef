for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], most = Number(table.dataset.most);
  const value = (row, i) => {
    const cell = row.cells[i], number = cell.dataset.v;
    return number === undefined ? cell.textContent : number === "" ? Infinity : Number(number);
  };
  const compare = (a, b) => typeof a === "number" && typeof b === "number"
    ? a - b || 0 : String(a).localeCompare(String(b), undefined, {numeric: true});
  table.querySelectorAll("th").forEach((head, i) => {
    const button = head.querySelector("button");
    if (!button) return;
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      table.querySelectorAll("th").forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down > 0 ? "ascending" : "descending");
      const rows = [...body.rows].map(row => [value(row, i), row]);
      const none = key => key === Infinity;
      rows.sort(([a], [b]) => none(a) || none(b) ? none(a) - none(b) : down * compare(a, b));
      rows.forEach(([, row], place) => {
        row.classList.toggle("more", place >= most);
        row.classList.remove("next");
      });
      body.append(...rows.map(([, row]) => row));
    });
  });
}
