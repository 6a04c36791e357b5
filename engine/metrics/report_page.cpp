// What the report's page looks like: style, the choice of what x is, and a script that reads values off
// curves. Without the script everything is there but that.
#include "engine/metrics/report.h"

namespace fp4t {

namespace {

constexpr const char* kPageStyle = R"css(
:root{color-scheme:light dark;--bg:#fff;--fg:#1c1f23;--dim:#5a6169;--rule:#d7dbe0;--soft:#f3f5f7;--heat:33 102 172;
--cold:176 88 0;--depth:.62;--warn:#8a4b00;--warn-bg:#fff3dd;
--c0:#0b62a3;--c1:#b8430a;--c2:#00704f;--c3:#8a3f86;--c4:#7a5c00;--c5:#127a99;--c6:#5b5b5b;--c7:#a8123e;
--bf16:#e6e8eb;--mxfp8:#cfe3f7;--nvfp4:#c9efcf;--fp32:#fff}
@media (prefers-color-scheme:dark){:root{--bg:#14171a;--fg:#e6e9ec;--dim:#a2abb4;--rule:#373d44;--soft:#1d2227;
--heat:64 140 220;--cold:214 120 30;--depth:.6;--warn:#ffc37a;--warn-bg:#35280f;
--c0:#6cb6ff;--c1:#ff9a62;--c2:#4fd0a5;--c3:#e29add;--c4:#e6c14a;--c5:#7fdcff;--c6:#b9b9b9;--c7:#ff8095;
--bf16:#2b3036;--mxfp8:#1d3b58;--nvfp4:#1c4427;--fp32:#14171a}}
*{box-sizing:border-box}
html{scroll-padding-top:3.5rem}
body{font:15px/1.5 system-ui,sans-serif;max-width:1280px;margin:0 auto;padding:0 1rem 3rem;color:var(--fg);
background:var(--bg);overflow-wrap:break-word}
h1{font-size:1.6rem;margin:1.2rem 0 .4rem}h2{font-size:1.3rem;margin:2.2rem 0 .6rem;border-bottom:1px solid var(--rule)}
h3{font-size:1.05rem;margin:1.4rem 0 .3rem}a{color:var(--c0)}
.skip{position:absolute;left:-999rem}.skip:focus{left:1rem;top:.5rem;background:var(--bg);padding:.3rem;z-index:3}
.bar{position:sticky;top:0;z-index:2;background:var(--bg);border-bottom:1px solid var(--rule);display:flex;
flex-wrap:wrap;gap:.2rem 1.2rem;align-items:center;justify-content:space-between;padding:.35rem 0}
nav{display:flex;gap:.2rem 1rem;flex-wrap:wrap}
fieldset{border:0;margin:0;padding:0;display:flex;gap:.2rem .8rem;align-items:center;flex-wrap:wrap}
legend{float:left;padding:0;margin-right:.2rem;color:var(--dim)}label{display:inline-flex;gap:.3rem;align-items:center}
:focus-visible{outline:2px solid var(--c0);outline-offset:2px}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,370px),1fr));gap:1rem 1.4rem}
figure{margin:0;min-width:0}figcaption{font-weight:600;font-size:.9rem;margin:.3rem 0 .1rem}
svg.chart{width:100%;height:auto;display:block;max-width:640px}
svg text{font:11px system-ui,sans-serif;fill:var(--dim)}
.grid{stroke:var(--rule);fill:none}
.line{fill:none;stroke:currentColor;stroke-width:1.6;stroke-linejoin:round}
.band{fill:currentColor;fill-opacity:.18;stroke:none}.mark{fill:currentColor;stroke:var(--bg);stroke-width:.6}
.cursor{stroke:var(--dim);stroke-width:1}
.d1 .line{stroke-dasharray:7 3}.d2 .line{stroke-dasharray:2 2.5}.d3 .line{stroke-dasharray:9 3 2 3}
.d4 .line{stroke-dasharray:4 2}
.s0{color:var(--c0)}.s1{color:var(--c1)}.s2{color:var(--c2)}.s3{color:var(--c3)}.s4{color:var(--c4)}
.s5{color:var(--c5)}.s6{color:var(--c6)}.s7{color:var(--c7)}
.ax-tokens,.ax-time{display:none!important}
body:has(#x-tokens:checked) .ax-step,body:has(#x-time:checked) .ax-step{display:none!important}
body:has(#x-tokens:checked) .ax-tokens,body:has(#x-time:checked) .ax-time{display:block!important}
.legend{list-style:none;margin:.1rem 0 0;padding:0;display:flex;flex-wrap:wrap;gap:0 1rem;font-size:.8rem}
.legend svg{width:30px;height:12px;vertical-align:-1px}.legend span{color:var(--fg)}.legend b{color:var(--fg)}
.legend em{color:var(--warn)}
.readout{min-height:1.3em;margin:0;font-size:.8rem;color:var(--dim);font-variant-numeric:tabular-nums}
.note{color:var(--dim);font-size:.85rem}.missing{color:var(--warn);background:var(--warn-bg);padding:.3rem .6rem;
border-radius:4px;font-size:.9rem;margin:.3rem 0}
.scroll{overflow-x:auto;max-width:100%}
table{border-collapse:collapse;font-size:.82rem;margin:.3rem 0}
td,th{border:1px solid var(--rule);padding:.15rem .5rem;text-align:left;font-weight:400;vertical-align:top}
.facts td{overflow-wrap:anywhere;min-width:8rem}thead th{background:var(--soft);font-weight:600}tbody th{background:var(--bg);position:sticky;left:0;min-width:7rem}
td.bf16{background:var(--bf16)}td.mxfp8{background:var(--mxfp8)}td.nvfp4{background:var(--nvfp4)}
td.fp32{background:var(--fp32)}td.differs,tr.differs>td{box-shadow:inset 3px 0 0 var(--c7)}
.differs>.ne,td.differs .ne{color:var(--c7);font-weight:700}
.heat td{text-align:right;font-variant-numeric:tabular-nums;border:1px solid var(--bg);min-width:2.9rem;
background:rgb(var(--heat)/calc(.05 + var(--v)*var(--depth)))}
.heat td.neg{background:rgb(var(--cold)/calc(.05 + var(--v)*var(--depth)))}.heat td.none{background:none}
.heat th{white-space:nowrap;border-color:var(--bg)}
.heats{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,560px),1fr));gap:1rem 1.4rem}
.figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(9.5rem,1fr));gap:.6rem;margin:.8rem 0}
.figures div{border:1px solid var(--rule);border-radius:6px;padding:.3rem .7rem}
.figures b{display:block;font-size:1.3rem;font-variant-numeric:tabular-nums}.figures span{color:var(--dim);
font-size:.8rem}
.run{font-weight:600;border-left:4px solid currentColor;padding-left:.35rem}
.runs{list-style:none;margin:.3rem 0;padding:0;display:grid;gap:.15rem .8rem}
.runs code{color:var(--dim);font-size:.8rem}
pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:0;font:12px/1.45 ui-monospace,monospace;
unicode-bidi:isolate;max-height:16rem;overflow-y:auto}
summary{cursor:pointer;margin:.5rem 0}
@media (max-width:520px){body{padding:0 .6rem 2rem;font-size:14px}h1{font-size:1.3rem}.bar{position:static}
.charts,.heats{gap:.9rem}tbody th{min-width:5.5rem}td,th{padding:.15rem .35rem}svg text{font-size:12px}}
@media print{:root{--bg:#fff;--fg:#000;--dim:#333;--rule:#bbb;--soft:#f3f5f7;--heat:33 102 172;--cold:176 88 0;
--depth:.62;--warn:#8a4b00;--warn-bg:#fff3dd;--c0:#0b62a3;--c1:#b8430a;--c2:#00704f;--c3:#8a3f86;--c4:#7a5c00;
--c5:#127a99;--c6:#5b5b5b;--c7:#a8123e;--bf16:#e6e8eb;--mxfp8:#cfe3f7;--nvfp4:#c9efcf;--fp32:#fff}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}html{font-size:11px}body{font-size:11px;max-width:none;padding:0}
.bar,.skip,.readout{display:none}.charts{grid-template-columns:1fr 1fr}.heats{grid-template-columns:1fr}
figure,tr,.figures div{break-inside:avoid}h2,h3{break-after:avoid}.scroll,pre{overflow:visible;max-height:none}
table{font-size:8px}td,th{padding:1px 3px}.heat td{min-width:0}tbody th{position:static;min-width:0}}
)css";

// Curves answer the pointer and the arrow keys with the values at a place: found again from the drawing, to
// about four digits.
constexpr const char* kPageScript = R"js(
'use strict';
for (const svg of document.querySelectorAll('svg.chart')) {
  const out = svg.closest('figure').querySelector('.readout');
  const [xLow, xHigh, left, right, yLow, yHigh, bottom, top] = svg.dataset.extents.split(' ').map(Number);
  const lines = [...svg.querySelectorAll('path.line')].map(path => ({
    name: path.dataset.name,
    points: path.getAttribute('d').split(/[ML]/).slice(1).map(p => p.split(' ').map(Number)),
  })).filter(line => line.points.length);
  if (!out || !lines.length) continue;
  const short = v => Number(v.toPrecision(4)).toString();
  const near = (points, x) => points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
  let at = null, cursor = null;
  const show = x => {
    const longest = lines.reduce((a, b) => b.points.length > a.points.length ? b : a);
    at = near(longest.points, x)[0];
    if (!cursor) {
      cursor = document.createElementNS('http://www.w3.org/2000/svg', 'line');
      cursor.setAttribute('class', 'cursor');
      svg.append(cursor);
    }
    for (const [k, v] of [['x1', at], ['x2', at], ['y1', top], ['y2', bottom]]) cursor.setAttribute(k, v);
    const value = p => yLow + (p[1] - bottom) / (top - bottom) * (yHigh - yLow);
    const place = xLow + (at - left) / (right - left) * (xHigh - xLow);
    out.textContent = svg.dataset.x + ' ' + short(place) + ': ' +
      lines.map(line => [line, near(line.points, at)])
        .filter(([line, p]) => Math.abs(p[0] - at) < 6 || line.points.length === 1)
        .map(([line, p]) => line.name + ' ' + short(value(p))).join(', ');
  };
  const hide = () => { if (cursor) cursor.remove(); cursor = at = null; out.textContent = ''; };
  svg.addEventListener('pointermove', e => {
    const box = svg.getBoundingClientRect();
    show((e.clientX - box.left) / box.width * svg.viewBox.baseVal.width);
  });
  svg.addEventListener('pointerleave', hide);
  svg.addEventListener('blur', hide);
  svg.addEventListener('keydown', e => {
    if (e.key === 'Escape') return hide();
    const way = e.key === 'ArrowRight' ? 1 : e.key === 'ArrowLeft' ? -1 : 0;
    if (!way) return;
    e.preventDefault();
    const xs = lines.reduce((a, b) => b.points.length > a.points.length ? b : a).points.map(p => p[0]);
    const i = at === null ? (way > 0 ? -1 : xs.length) : xs.indexOf(at);
    show(xs[Math.min(xs.length - 1, Math.max(0, i + way))]);
  });
}
)js";

}  // namespace

std::string page_head(const std::string& title) {
  return "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><meta "
         "http-equiv=\"Content-Security-Policy\" "
         "content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'\"><meta "
         "name=\"viewport\" content=\"width=device-width,initial-scale=1\"><title>" +
         html_escape(title) + "</title><style>" + kPageStyle + "</style></head>";
}

std::string axis_choice() {
  std::string out = "<fieldset><legend>x axis</legend>";
  for (const auto& [id, name] : {std::pair{"step", "steps"}, {"tokens", "tokens"}, {"time", "time"}}) {
    out += std::string("<label><input type=\"radio\" name=\"x\" id=\"x-") + id + "\"" +
           (std::string(id) == "step" ? " checked" : "") + ">" + name + "</label>";
  }
  return out + "</fieldset>";
}

std::string page_script() { return std::string("<script>") + kPageScript + "</script>"; }

}  // namespace fp4t
