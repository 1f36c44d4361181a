"""Charts of a page as SVG: over steps, of one step, of memory, bytes and energy.

Imports data modules of `telemetry.page` and arrays; loads matplotlib to draw. Begin with `over_steps.charts` and
`style.draw_svg`.
"""
