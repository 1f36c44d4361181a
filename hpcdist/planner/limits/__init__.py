"""Limits of layouts: impossible layouts (`checks`), and layouts that hpcdist cannot run (`unsupported`)."""
