// A field above each long table, which shows the rows that contain its text.
for (const table of document.querySelectorAll(".md-typeset table")) {
  const rows = [...table.tBodies[0].rows];
  if (rows.length < 40) continue;
  const field = Object.assign(document.createElement("input"), {
    type: "search",
    className: "filter",
    placeholder: `Filter ${rows.length} rows`,
    ariaLabel: "Filter the rows of the table",
  });
  field.addEventListener("input", () => {
    const text = field.value.trim().toLowerCase();
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(text);
  });
  (table.closest(".md-typeset__scrollwrap") ?? table).before(field);
}
