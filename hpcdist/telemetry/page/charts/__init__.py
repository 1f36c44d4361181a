"""Charts of a page as SVG: over steps, of one step, of memory, bytes and energy.

Begin with `over_steps.charts` and `style.draw_svg`.
"""
