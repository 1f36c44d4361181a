"""Charts of a page as SVG: over steps, of one step, of memory, bytes and energy.

Floor 5, inside telemetry.page: imports `hpcdist.telemetry.page` data modules and arrays; loads matplotlib when a chart
is drawn. `style` has the look of all charts, `series` shortens long series and labels axes.
Begin with `over_steps.charts` and `style.draw_svg`.
"""
