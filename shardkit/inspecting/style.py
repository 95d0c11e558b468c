"""How the page looks: light or dark as the reader has it, and down to the width of a phone."""

from __future__ import annotations

__all__ = ["STYLE"]

STYLE = """
:root { --ink: #1f2328; --soft: #59636e; --line: #d1d9e0; --paper: #ffffff; --card: #f6f8fa; --bar: #2f6fb5;
  --good: #1a7f37; --bad: #c1272d }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9aa4af; --line: #3d444d; --paper: #0d1117; --card: #161b22; --bar: #6cb0f5;
    --good: #4ac26b; --bad: #ff7b72 }
}
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; font: 15px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--paper) }
h1 { margin: 0; font-size: 1.7rem; overflow-wrap: anywhere }
h2 { margin: 2.2rem 0 .6rem; font-size: 1.2rem; border-bottom: 1px solid var(--line) }
h3 { margin: 1.2rem 0 .4rem; font-size: 1rem; overflow-wrap: anywhere }
header p, small, .note, figcaption, footer { color: var(--soft) }
small { font-size: .85em; font-weight: normal }
.good { color: var(--good) } .bad { color: var(--bad) }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(20rem, 100%), 1fr)); gap: .1rem 2rem;
  margin: 0 }
dl div { display: flex; gap: 1rem; justify-content: space-between; border-bottom: 1px solid var(--line) }
dt { color: var(--soft); overflow-wrap: anywhere; min-width: 6rem }
dd { margin: 0; text-align: right; overflow-wrap: anywhere; min-width: 0 }
.wide { overflow-x: auto; margin: .6rem 0 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .15rem .7rem .15rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line) }
th { font-weight: 600; color: var(--soft); white-space: nowrap }
.line td { white-space: nowrap }
td { max-width: min(44rem, 70vw); overflow-wrap: break-word }
.number { text-align: right; white-space: nowrap }
.bar { display: block; height: .7rem; min-width: 1px; margin-top: .4rem; background: var(--bar) }
td:has(.bar) { width: 12rem; min-width: 6rem }
.tables { display: flex; flex-wrap: wrap; gap: 0 2.5rem }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(21rem, 100%), 1fr)); gap: 1rem }
figure { margin: 0; min-width: 0 }
.charts figure { padding: .7rem; background: var(--card); border-radius: 6px }
svg { display: block; width: 100%; height: auto }
svg * { stroke-linejoin: round; stroke-linecap: butt }
.sheet { display: grid; grid-template-columns: repeat(auto-fill, minmax(8rem, 1fr)); gap: .8rem }
.sheet img, .none { display: block; width: 100%; height: 8rem; object-fit: contain; background: var(--card);
  border-radius: 4px }
.none { padding: .4rem; overflow: auto; font-size: .8rem; color: var(--bad); overflow-wrap: anywhere }
figcaption { font-size: .85rem; overflow-wrap: anywhere }
.sheet small { display: block }
footer { margin-top: 3rem; font-size: .85rem }
"""
