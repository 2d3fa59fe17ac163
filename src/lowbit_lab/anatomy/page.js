"use strict";
// A click on a row marks every row, in all panes, that comes from the same line of the source.
const rows = [...document.querySelectorAll("li[data-at]")];
function mark(chosen) {
  const at = chosen.dataset.at;
  for (const row of rows) row.classList.toggle("on", row.dataset.at === at);
  for (const pane of document.querySelectorAll(".pane ol")) {
    if (pane.contains(chosen)) continue;
    const first = pane.querySelector("li.on");
    if (first) pane.scrollTop = first.offsetTop - pane.offsetTop - pane.clientHeight / 3;
  }
  const status = document.getElementById("now");
  status.textContent = `${chosen.dataset.place}: ${document.querySelectorAll("li.on").length} rows`;
}
for (const row of rows) {
  row.tabIndex = 0;
  row.addEventListener("click", () => mark(row));
  row.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); mark(row); }
  });
}
