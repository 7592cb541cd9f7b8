"""The page, as a jinja2 template."""

TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Springtide: {{ title }}{% if subtitle %} ({{ subtitle }}){% endif %}</title>
<style>
:root { --paper: #ffffff; --panel: #f6f8fa;
{% for colour in colours %}
  --{{ colour.name }}: {{ colour.light }};
{% endfor %}
}
@media (prefers-color-scheme: dark) {
  :root { --paper: #0f1419; --panel: #171d24;
{% for colour in colours %}
    --{{ colour.name }}: {{ colour.dark }};
{% endfor %}
  }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 2rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
h1 { margin: 0; font-size: 1.7rem; line-height: 1.2; }
h2 { margin: 2.5rem 0 .6rem; font-size: 1.15rem; }
.subtitle { margin: .3rem 0 0; color: var(--muted); }
.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: .94rem; }
th, td { padding: .32rem .7rem; border-bottom: 1px solid var(--grid); text-align: left; vertical-align: baseline; }
thead th { border-bottom: 2px solid var(--muted); font-weight: 600; }
tbody th { font-weight: 400; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
td.unit { width: 1%; color: var(--muted); white-space: nowrap; }
td.best { font-weight: 700; }
figure { margin: 0; padding: 1rem 1rem .8rem; border-radius: .5rem; background: var(--panel); }
figure svg { display: block; width: 100%; height: auto; }
figcaption { margin-top: .6rem; color: var(--muted); font-size: .92rem; }
details { margin-top: 1rem; }
summary { cursor: pointer; color: var(--muted); }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p class="subtitle">{{ subtitle }}</p>
{% macro table(rows) %}
<div class="scroll"><table>
<thead><tr><th scope="col"></th>{% for name in names %}<th scope="col" class="number">{{ name }}</th>{% endfor %}
<th scope="col">unit</th></tr></thead>
<tbody>
{% for row in rows %}
<tr><th scope="row">{{ row.label }}</th>{% for cell in row.cells %}
<td class="number{{ ' best' if loop.index0 in row.best else '' }}">{{ cell }}</td>{% endfor %}
<td class="unit">{{ row.unit }}</td></tr>
{% endfor %}
</tbody></table></div>
{% endmacro %}
<h2>Summary</h2>
{{ table(summary) }}
{% if several %}
<p class="subtitle">Bold: the best of the runs, which says little where the others reject more. Latencies are those of requests served.</p>
{% endif %}
{% for picture, caption, svg in pictures %}
<h2>{{ picture.title }}</h2>
<figure role="group" aria-label="{{ picture.title }}">
{# matplotlib has escaped the labels in it #}
{{ svg | safe }}
<figcaption>{{ caption }}</figcaption>
</figure>
{% endfor %}
<h2>Settings</h2>
{% if several %}
{% if differing %}
{{ table(differing) }}
{% endif %}
<details><summary>All settings</summary>
{{ table(settings) }}
</details>
{% else %}
{{ table(settings) }}
{% endif %}
</body>
</html>
"""
