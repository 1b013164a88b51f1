"""The style sheet of report.html: one column on a phone, two on a desk, light and dark."""

CSS = """
:root { color-scheme: light dark;
  --paper: #fbfaf8; --card: #ffffff; --ink: #1d2329; --soft: #5d6770; --faint: #e6e3dd; --edge: #e2dfd8;
  --c0: #1f66c1; --c1: #12806a; --c2: #c8590a; --c3: #7a4bc2; --c4: #b0308a; --c5: #6b7a12; --c6: #a33a32;
  --c7: #4a5560; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14171a; --card: #1b1f23; --ink: #e8e6e1; --soft: #9ba4ad; --faint: #2b3136; --edge: #2b3136;
  --c0: #6aaaf5; --c1: #4fc3a6; --c2: #f29a55; --c3: #b394f0; --c4: #ea86cb; --c5: #bccb5c; --c6: #f08d84;
  --c7: #aab4bd; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 40px 24px 64px; }
header p { margin: 0; color: var(--soft); }
h1 { margin: 0; font-size: 2rem; line-height: 1.2; letter-spacing: -.015em; overflow-wrap: anywhere; }
h2 { margin: 44px 0 14px; font-size: 1.15rem; letter-spacing: -.005em; }
.badge { display: inline-block; margin-left: .5em; padding: .1em .65em; border-radius: 1em;
  font-size: .8rem;
  font-weight: 600; letter-spacing: 0; vertical-align: middle; border: 1px solid currentColor; }
.finished { color: var(--c1); } .running { color: var(--c0); } .interrupted { color: var(--c2); }
.failed { color: var(--c6); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); gap: 12px;
  margin: 26px 0; }
.tiles div { background: var(--card); border: 1px solid var(--edge); border-radius: 10px;
  padding: 14px 16px; }
.tiles span { display: block; color: var(--soft); font-size: .85rem; }
.tiles strong { display: block; font-size: 1.65rem; font-weight: 650; line-height: 1.3;
  letter-spacing: -.02em;
  font-variant-numeric: tabular-nums; }
.words { max-width: 74ch; margin: 26px 0 0; padding-left: 1.1em; } .words li { margin: .25em 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 16px;
  }
.stack { display: grid; gap: 16px; align-content: start; }
figure { margin: 0; padding: 16px 18px 12px; background: var(--card); border: 1px solid var(--edge);
  border-radius: 10px; min-width: 0; display: flex; flex-direction: column; }
figure > svg { margin: auto 0 0; } figure > .spans { margin: auto 0; }
figcaption { font-weight: 600; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 4px 0 8px; padding: 0;
  font-size: .85rem; color: var(--soft); }
.legend b { color: var(--ink); font-weight: 600; font-variant-numeric: tabular-nums; }
.legend i { display: inline-block; width: 16px; margin-right: 6px; border-top: 3px solid var(--c);
  vertical-align: .28em; }
.legend .dashed i { border-top-style: dotted; }
.legend .square i { width: 10px; height: 10px; border: 0; border-radius: 2px; background: var(--c);
  vertical-align: -.02em; }
.empty { color: var(--soft); }
.note { color: var(--soft); font-size: .9rem; max-width: 74ch; margin: 0 0 14px; }
svg { display: block; width: 100%; height: auto; overflow: visible; font-size: 12px;
  font-variant-numeric: tabular-nums; }
svg text { fill: var(--soft); } svg .end { text-anchor: end; } svg .mid { text-anchor: middle; }
svg .strong { fill: var(--ink); font-weight: 600; }
svg .grid { stroke: var(--faint); } svg .axis { stroke: var(--soft); stroke-width: .8; }
svg .line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
svg .line.dashed { stroke-dasharray: 1 4.5; }
svg .span { stroke: var(--c); stroke-width: 2; opacity: .35; }
svg circle { fill: var(--c); stroke: var(--card); stroke-width: 1.5; }
svg circle.hollow { fill: var(--card); stroke: var(--c); stroke-width: 2; }
svg .block { fill: var(--c); } svg.bar { height: 26px; border-radius: 5px; overflow: hidden;
  margin-bottom: 6px; }
.shade1 { opacity: .68; } .shade2 { opacity: .4; } .legend .shade1, .legend .shade2 { opacity: 1; }
.legend .shade1 i { opacity: .68; } .legend .shade2 i { opacity: .4; }
.tip rect { fill: transparent; } .tip line, .tip circle, .tip text { visibility: hidden; }
.tip tspan { fill: var(--c); font-weight: 600; }
.tip line { stroke: var(--soft); stroke-width: .8; stroke-dasharray: 2 2; }
.tip:hover line, .tip:hover circle, .tip:hover text { visibility: visible; }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); }
.c4 { --c: var(--c4); } .c5 { --c: var(--c5); } .c6 { --c: var(--c6); } .c7 { --c: var(--c7); }
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--edge); border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { padding: 9px 16px; text-align: left; white-space: nowrap; border-top: 1px solid var(--faint);
  font-variant-numeric: tabular-nums; }
thead th { border-top: 0; color: var(--soft); font-weight: 500; font-size: .85rem; }
tbody th { font-weight: 600; }
.fleet svg { display: inline-block; width: auto; height: 20px; margin-right: 6px; vertical-align: middle; }
.fleet .link { stroke: var(--c); } .fleet .thin { stroke-width: 1.5; } .fleet .thick { stroke-width: 7; }
.actual .number { text-align: right; } .actual tbody th { padding-top: 18px; }
.actual th, .actual td { padding-left: 12px; padding-right: 8px; } .actual small { color: var(--soft); }
.actual td { padding-top: 4px; padding-bottom: 4px; border-top: 0; font-size: .88rem; }
.actual svg { display: inline-block; width: 56px; height: 12px; margin-left: 4px; vertical-align: -.1em; }
details { margin-top: 14px; background: var(--card); border: 1px solid var(--edge); border-radius: 10px; }
summary { padding: 12px 18px; cursor: pointer; font-weight: 600; }
details pre { margin: 0; padding: 4px 18px 18px; overflow-x: auto;
  font: .84rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
details td, details th { white-space: normal; overflow-wrap: anywhere; vertical-align: top; }
@media (max-width: 560px) { main { padding: 24px 14px 48px; } h1 { font-size: 1.6rem; }
  .tiles { grid-template-columns: 1fr 1fr; gap: 8px; } .tiles div { padding: 10px 12px; }
  .tiles strong { font-size: 1.3rem; }
  figure { padding: 12px 12px 8px; } svg { font-size: 14px; } th, td { padding: 8px 9px; } }
@media print { figure, .wide, details { break-inside: avoid; } }
"""
