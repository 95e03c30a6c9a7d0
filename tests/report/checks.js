// Put into a page by test_browser.py, before the page's own scripts: notes what goes wrong, and tells the frame around it.
const problems = [];
addEventListener("error", (event) => problems.push(String(event.message)));
addEventListener("unhandledrejection", (event) => problems.push(String(event.reason)));
addEventListener("securitypolicyviolation", (event) => problems.push(`${event.violatedDirective} ${event.blockedURI}`));
for (const kind of ["error", "warn"]) console[kind] = (...words) => problems.push(words.join(" "));

function overlapping(plot) {
  const boxes = [...plot.querySelectorAll("text")].filter((t) => t.textContent.trim() && !t.closest("[aria-label=tip]")).map((t) => t.getBoundingClientRect());
  const meet = (a, b) => a.left < b.right - 2 && b.left < a.right - 2 && a.top < b.bottom - 3 && b.top < a.bottom - 3;
  return boxes.filter((a, i) => boxes.some((b, j) => j > i && meet(a, b))).length;
}

addEventListener("load", async () => {
  const plots = [...document.querySelectorAll(".plot")];
  const told = {
    problems,
    requests: performance.getEntriesByType("resource").map((entry) => entry.name),
    theme: document.documentElement.dataset.theme,
    wide: [document.documentElement.scrollWidth, innerWidth],
    charts: plots.length,
    empty: plots.filter((p) => !p.querySelector("svg path, svg circle, svg rect")).map((p) => p.dataset.chart),
    // names of many clients in a column of a heat map may come near each other; elsewhere nothing does
    overlapping: plots.filter((p) => overlapping(p)).map((p) => p.dataset.chart),
    alerted: window.alerted ?? false,
  };
  if (document.querySelector("table[data-sortable]")) {
    const button = document.querySelector("table[data-sortable] thead th:nth-child(2) button");
    button.click();
    told.sorted = button.closest("th").getAttribute("aria-sort");
    told.keys = [...button.closest("table").tBodies[0].rows].map((row) => Number(row.children[1].dataset.key ?? row.children[1].textContent));
  }
  const first = document.querySelector("details.data"); // of a chart, where there are some
  if (first) first.open = true;
  document.getElementById("theme").click();
  told.other = document.documentElement.dataset.theme;
  await new Promise((wake) => setTimeout(wake, 100));
  told.table = document.querySelectorAll("details.data[open] tbody tr").length;
  if (window.axe) {
    const found = await axe.run(document, { resultTypes: ["violations"] });
    told.axe = found.violations.map((v) => `${v.id}: ${v.nodes[0].html.slice(0, 200)}`);
  }
  parent.postMessage(told, "*");
});
