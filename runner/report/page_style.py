"""How a report looks and what its few lines of script do; nothing comes from elsewhere."""

__all__ = ["CSS", "SCRIPT"]

_LIGHT = """--paper:#ffffff;--back:#f4f5f7;--ink:#1b1e23;--muted:#5d6570;--faint:#eef0f3;
--grid:#dfe3e8;--accent:#0072b2;--warn:#c04a00;--good:#e4f1f9;--c0:#0072b2;--c1:#d98f00;--c2:#00896a;--c3:#b8558f;
--c4:#3f9fd8;--c5:#7d6216;--c6:#5b4fa2;--c7:#6d6d6d;color-scheme:light;"""
_DARK = """--paper:#1b1f26;--back:#12151a;--ink:#e8ebef;--muted:#a0a9b5;--faint:#242a33;
--grid:#343c47;--accent:#56b4e9;--warn:#ff9a57;--good:#173247;--c0:#56b4e9;--c1:#f0b54a;--c2:#3fcaa2;--c3:#e79bc7;
--c4:#9ad4f5;--c5:#cfae58;--c6:#a99ff0;--c7:#b4b4b4;color-scheme:dark;"""

CSS = (
    f":root{{{_LIGHT}}}"
    f"@media screen and (prefers-color-scheme:dark){{:root{{{_DARK}}}}}"
    """
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--ink);font:14px/1.45 system-ui,-apple-system,
"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1400px;margin:0 auto;padding:18px 24px 40px}
h1{font-size:21px;margin:0}h2{font-size:15px;margin:0 0 8px}
h1+p,.muted{color:var(--muted);margin:2px 0 0}
.question{font-size:16px;margin:8px 0 0}
.verdict{background:var(--paper);border-left:4px solid var(--accent);border-radius:6px;
padding:10px 14px;margin:12px 0}
.verdict p{margin:0;font-size:16px}.verdict ul{margin:4px 0 0;padding-left:18px;color:var(--muted)}
.counts{display:flex;gap:8px;flex-wrap:wrap;list-style:none;padding:0;margin:8px 0 0}
.counts li{border-radius:99px;padding:1px 11px;background:var(--paper);border:1px solid var(--grid)}
.counts .infeasible,.counts .failed,.counts .cut_off{color:var(--warn);border-color:var(--warn)}
.grid{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));align-items:start}
section{background:var(--paper);border-radius:8px;padding:12px 14px;margin:0 0 14px;
box-shadow:0 1px 2px #0002}
.grid{column-gap:14px}
figure{margin:0}svg{max-width:100%;height:auto;display:block}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}
th,td{padding:3px 6px;text-align:left;border-bottom:1px solid var(--grid);white-space:nowrap}
th{vertical-align:bottom;font-weight:600;white-space:normal;border-bottom:2px solid var(--muted)}
th small,td small{font-weight:400;color:var(--muted)}
.n{text-align:right}
th button{all:unset;cursor:pointer}th button:focus-visible{outline:2px solid var(--accent)}
th[aria-sort=ascending] button::after{content:" \\25B2";font-size:9px}
th[aria-sort=descending] button::after{content:" \\25BC";font-size:9px}
tr.best td{background:var(--good);font-weight:600}tr.none td{color:var(--muted)}
tr.none .status{color:var(--warn)}
tr.next td{border-top:2px solid var(--muted)}
a{color:var(--accent)}td a{font-size:11px}.worse{color:var(--warn)}.better{color:var(--accent)}
tbody tr:hover td{background:var(--faint)}
#all:not(:checked)~.scroll tr.more{display:none}
#all{accent-color:var(--accent)}
.mono,pre{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;
font-size:12px}
.id{display:inline-block;max-width:8ch;overflow:hidden;text-overflow:ellipsis;
vertical-align:bottom;user-select:all}
pre{background:var(--faint);border-radius:6px;padding:8px 10px;margin:4px 0 10px;overflow-x:auto;
user-select:all;white-space:pre-wrap;overflow-wrap:anywhere}
.reasons{margin:0;padding-left:18px;overflow-wrap:anywhere}
@media (max-width:1000px){.grid{grid-template-columns:minmax(0,1fr)}}
@media print{body{background:#fff}main{padding:0;max-width:none}section{box-shadow:none;
break-inside:avoid;border:1px solid var(--grid)}section.long{break-inside:auto}
.screen{display:none}.scroll{overflow:visible}th,td{padding:1px 5px;font-size:10px}}
"""
)

SCRIPT = """
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
"""
