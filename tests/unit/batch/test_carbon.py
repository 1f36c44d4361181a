"""The start time of a job from a carbon forecast: brute force, closed forms, and daylight saving time."""

import itertools
import time
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.marks import cases
from hpcdist.batch import carbon
from hpcdist.errors import ConfigurationError, StorageError, UsageError

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


def hourly_forecast(*values, begin=NOON):
    times = tuple(begin + index * HOUR for index in range(len(values)))
    return carbon.CarbonForecast(Path("forecast.csv"), times, tuple(float(value) for value in values))


def write_forecast(folder, text):
    (folder / "forecast.csv").write_text(text)
    return folder / "forecast.csv"


@pytest.fixture
def zone(monkeypatch):
    """A function that sets the local time zone."""

    def move(name):
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield move
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("header", ["time,gCO2/kWh", "Timestamp, gco2_per_kwh ", "zone,DATETIME,gCO2eq/kWh"])
def test_forecast_file_is_read(tmp_path, header):
    zone = "DE," if header.startswith("zone") else ""
    rows = f"{zone}2026-11-22T12:00:00Z,300\n\n{zone}2026-11-22T14:00:00+01:00, 2.5e2\n{zone}2026-11-22T13:30Z,.5\n"
    forecast = carbon.read_forecast(write_forecast(tmp_path, f"\ufeff{header}\n{rows}"))
    assert forecast.times == (NOON, NOON + HOUR, NOON + 1.5 * HOUR) and forecast.g_per_kwh == (300, 250, 0.5)
    assert (forecast.begin, forecast.end) == (NOON, NOON + 2 * HOUR), "the last row is as long as the one before"
    assert forecast.mean(NOON, 2 * HOUR) == pytest.approx((300 + 250 * 0.5 + 0.5 * 0.5) / 2)


ROW = "2026-11-22T12:00:00Z,300\n"


@cases(
    "text, words",
    ("", "line 1: no column is named time"),
    ("time,intensity\n" + ROW, "no column is named gco2/kwh"),
    ("time,gCO2/kW\n" + ROW, "'gco2/kw' is similar"),
    ("time,gCO2/kWh,gCO2eq/kWh\n", "2 columns hold gco2/kwh: gCO2/kWh, gCO2eq/kWh; keep one column"),
    ("time,gCO2/kWh\n" + ROW, "1 rows; give at least 2"),
    ("time,gCO2/kWh\n" + ROW + ROW, "line 3: .* is not after"),
    ("time,gCO2/kWh\n" + ROW + "2026-11-22T13:00:00+01:00,5\n", "line 3: .* is not after"),
    ("time,gCO2/kWh\n2026-11-22T12:00:00,300\n", "line 2: '2026-11-22T12:00:00' has no time zone.* Z for UTC"),
    ("time,gCO2/kWh\n\n22.11.2026 12:00,300\n", "line 3: '22.11.2026 12:00' is not an ISO 8601 time"),
    ("time,gCO2/kWh\n0001-01-01T00:00:00+01:00,300\n", "in the years 1 to 9999"),
    ("time,gCO2/kWh\n2026-11-22T12:00:00Z\n", "line 2: 1 values, but the header has 2 columns"),
    *(
        (f"time,gCO2/kWh\n2026-11-22T12:00:00Z,{value}\n", f"line 2: intensity '{value}'")
        for value in ("-1", "nan", "inf", "1e999", "", "1_000", "300 g", "0x10")
    ),
    ('time,gCO2/kWh\n"2026', "cannot read the forecast"),
)
def test_invalid_forecast_names_the_line(tmp_path, text, words):
    with pytest.raises(ConfigurationError, match=words):
        carbon.read_forecast(write_forecast(tmp_path, text))


def test_missing_or_undecodable_forecast_is_rejected(tmp_path):
    with pytest.raises(StorageError, match=r"missing\.csv"):
        carbon.read_forecast(tmp_path / "missing.csv")
    (tmp_path / "bytes.csv").write_bytes(b"time,gCO2/kWh\n\xff\xfe")
    with pytest.raises(ConfigurationError, match=r"bytes\.csv"):
        carbon.read_forecast(tmp_path / "bytes.csv")


def test_best_window_saving_matches_closed_form():
    window = carbon.best_window(hourly_forecast(400, 300, 100, 100, 300, 400), NOON, 2 * 3600, NOON + 6 * HOUR)
    assert (window.begin, window.end) == (NOON + 2 * HOUR, NOON + 4 * HOUR)
    assert (window.mean_g_per_kwh, window.now_g_per_kwh) == (100, 350)
    assert window.saving_percent == pytest.approx(100 * 250 / 350)
    assert window.saving_g(2000) == pytest.approx(250 * 2 * 2)  # g/kWh x kW x h


def test_window_longer_than_the_minimum_extends_to_lower_side():
    """1.5 hours over 400 100 200: the whole row of 100, and half of the row of 200."""
    window = carbon.best_window(hourly_forecast(400, 100, 200), NOON, 5400, NOON + 3 * HOUR)
    assert window.begin == NOON + HOUR and window.mean_g_per_kwh == pytest.approx((100 + 0.5 * 200) / 1.5)
    window = carbon.best_window(hourly_forecast(200, 100, 400), NOON, 5400, NOON + 3 * HOUR)
    assert window.end == NOON + 2 * HOUR, "the window must end where a row begins"


def test_earliest_of_equal_windows_is_chosen():
    assert (
        carbon.best_window(hourly_forecast(0.3, 0.1, 0.7, 0.1, 0.7), NOON, 3600, NOON + 5 * HOUR).begin == NOON + HOUR
    )
    flat = carbon.best_window(hourly_forecast(5, 5, 5, 5), NOON + timedelta(seconds=7), 3600, NOON + 4 * HOUR)
    assert flat.begin == NOON + timedelta(seconds=7) and flat.saving_percent == 0


def test_deadline_and_now_bound_the_window():
    forecast = hourly_forecast(9, 8, 7, 6, 5)
    assert carbon.best_window(forecast, NOON, 3600, NOON + 2.25 * HOUR).begin == NOON + 1.25 * HOUR
    assert (
        carbon.best_window(hourly_forecast(1, 2, 3, 4), NOON + 0.25 * HOUR, 3600, NOON + 4 * HOUR).begin
        == NOON + 0.25 * HOUR
    )
    assert carbon.best_window(forecast, NOON, 3600, NOON + 99 * HOUR).end == forecast.end, "the forecast ends here"


def test_saving_is_unknown_if_forecast_does_not_cover_now():
    window = carbon.best_window(hourly_forecast(300, 200), NOON - HOUR, 3600, NOON + 2 * HOUR)
    assert window.begin == NOON + HOUR
    assert window.now_g_per_kwh is None and window.saving_percent is None and window.saving_g(100.0) is None
    assert "forecast covers" in window.why_not_now
    assert carbon.best_window(hourly_forecast(0, 0), NOON, 3600, NOON + 2 * HOUR).saving_percent == 0


@cases(
    "now, hours, deadline, error, words",
    (NOON, 3, NOON + 2 * HOUR, UsageError, "too soon"),
    (NOON, 3, NOON + 9 * HOUR, ConfigurationError, "covers too little of this time. It covers .* to "),
    (NOON + 5 * HOUR, 1, NOON + 9 * HOUR, ConfigurationError, "newer or longer forecast"),
    (NOON - 9 * HOUR, 1, NOON - HOUR, ConfigurationError, "covers"),
    (NOON, 0, NOON + HOUR, UsageError, "must be above 0 s"),
)
def test_infeasible_plans_are_rejected(now, hours, deadline, error, words):
    with pytest.raises(error, match=words):
        carbon.best_window(hourly_forecast(1, 2), now, hours * 3600, deadline)


@st.composite
def plans(draw):
    """Draw a forecast with rows of whole minutes, and a feasible now, duration and deadline in whole minutes."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    starts = list(itertools.accumulate(lengths, initial=0))
    values = draw(st.lists(st.integers(0, 3), min_size=len(starts), max_size=len(starts)))
    forecast = carbon.CarbonForecast(
        Path("f"), tuple(NOON + timedelta(minutes=start) for start in starts), tuple(value / 8 for value in values)
    )
    total = starts[-1] + lengths[-1]
    duration = draw(st.integers(1, total))
    now = draw(st.integers(-5, total - duration))
    return forecast, now, duration, draw(st.integers(max(now, 0) + duration, total + 5))


@settings(max_examples=200, deadline=None)
@given(plans())
def test_best_window_matches_brute_force(plan):
    forecast, now, duration, deadline = plan
    minute = timedelta(minutes=1)
    window = carbon.best_window(forecast, NOON + now * minute, duration * 60, NOON + deadline * minute)

    def of_minute(at):  # of the minute that starts at this time
        return round(
            8 * next(v for t, v in zip(forecast.times[::-1], forecast.g_per_kwh[::-1], strict=True) if t <= at)
        )

    room = range(max(now, 0), min(deadline, (forecast.end - NOON) // minute) - duration + 1)
    halves = {}  # on a grid of half minutes: begin in half minutes -> sum over the half minutes
    for begin in range(2 * room[0], 2 * room[-1] + 1):
        halves[begin] = sum(of_minute(NOON + (begin + k) * minute / 2) for k in range(2 * duration))
    least = min(halves.values())
    assert (window.begin - NOON) / minute * 2 == min(begin for begin, value in halves.items() if value == least)
    assert window.mean_g_per_kwh == pytest.approx(least / 16 / duration)
    assert window.end - window.begin == duration * minute and window.end <= NOON + deadline * minute
    if now >= 0 and NOON + (now + duration) * minute <= forecast.end:
        assert window.now_g_per_kwh == pytest.approx(halves[2 * now] / 16 / duration)
        assert window.saving_percent >= 0
    else:
        assert window.now_g_per_kwh is None


def test_deadline_may_be_time_or_duration(zone):
    zone("Europe/Berlin")
    for text in ("24h", "1d", "1440m", "1440", "24:00:00", "1-00:00:00"):
        assert carbon.deadline_of(text, NOON) == NOON + 24 * HOUR
    for text in ("2026-11-23T13:00", "2026-11-23 13:00:00", "2026-11-23T12:00Z", "2026-11-23T04:00-08:00"):
        assert carbon.deadline_of(text, NOON) == NOON + 24 * HOUR
    # Half past two comes twice: the first, in summer time, is the safe choice.
    assert carbon.deadline_of("2026-10-25T02:30", NOON) == datetime(2026, 10, 25, 0, 30, tzinfo=UTC)
    for text in ("2026-11-23", "tomorrow", "", "10:00", "T", "24 h", "2026-13-01T00:00", "0"):
        with pytest.raises(UsageError, match="--deadline"):
            carbon.deadline_of(text, NOON)


def test_forecast_over_change_to_summer_time(zone, tmp_path):
    """Local times with their zones over the change to summer time: the row before the change has one hour."""
    zone("Europe/Berlin")
    rows = ["2026-03-29T00:00:00+01:00,9", "2026-03-29T01:00:00+01:00,5", "2026-03-29T03:00:00+02:00,9"]
    forecast = carbon.read_forecast(write_forecast(tmp_path, "time,gCO2/kWh\n" + "\n".join(rows)))
    assert forecast.end - forecast.begin == 3 * HOUR
    assert carbon.best_window(forecast, forecast.begin, 7200, forecast.end).mean_g_per_kwh == 7
    assert (
        carbon.begin_text(carbon.best_window(forecast, forecast.begin, 3600, forecast.end).begin)
        == "2026-03-29T01:00:00"
    )
    assert carbon.begin_text(forecast.times[2]) == "2026-03-29T03:00:00"


def test_begin_is_written_in_local_time(zone):
    begin = datetime(2026, 11, 23, 5, 6, 7, 890, tzinfo=timezone(2 * HOUR))
    zone("America/New_York")
    assert carbon.begin_text(begin) == "2026-11-22T22:06:07"
    assert carbon.begin_text(begin, "pbs") == "202611222206.07"
    zone("UTC")
    assert carbon.begin_text(begin) == "2026-11-23T03:06:07"


def test_ambiguous_local_begin_time_is_rejected(zone):
    zone("Europe/Berlin")
    halves = [datetime(2026, 10, 25, hour, 30, tzinfo=UTC) for hour in (0, 1)]
    read = datetime.fromtimestamp(time.mktime((2026, 10, 25, 2, 30, 0, 0, 0, -1)), UTC)  # libc chooses one of the two
    assert read in halves and carbon.begin_text(read) == "2026-10-25T02:30:00"
    with pytest.raises(ConfigurationError, match="TZ=UTC"):
        carbon.begin_text(next(half for half in halves if half != read))
    zone("UTC")
    assert [carbon.begin_text(half)[11:16] for half in halves] == ["00:30", "01:30"]


def test_plan_begin_returns_start_and_summary_lines(tmp_path, zone):
    zone("UTC")
    rows = "".join(f"2026-11-22T{12 + hour}:00Z,{value}\n" for hour, value in enumerate((400, 300, 100, 300)))
    path = write_forecast(tmp_path, "time,gCO2/kWh\n" + rows)
    begin, lines = carbon.plan_begin(path, "4h", 3600, NOON, 1500.0)
    assert begin == NOON + 2 * HOUR
    assert lines == [
        "start not before 2026-11-22 14:00+00:00, end by 2026-11-22 15:00+00:00: 100.0 gCO2/kWh on average",
        "75.0 % less than 400.0 gCO2/kWh of a job that starts now: saves 450 g of CO2 at a constant 1500 W",
    ]
    assert "g of CO2" not in carbon.plan_begin(path, "4h", 3600, NOON)[1][1]
    early = carbon.plan_begin(path, "2026-11-22T16:00", 3600, NOON - HOUR, 1500.0)
    assert (
        early[0] == begin
        and "saving is unknown: the forecast does not cover" in early[1][1]
        and "12:00+00:00 to" in early[1][1]
    )
    with pytest.raises(UsageError, match="give the duration with --time"):
        carbon.plan_begin(path, "4h", None, NOON)
    with pytest.raises(UsageError, match="--within"):
        carbon.plan_begin(path, None, 3600, NOON)
    for power in (0.0, -1.0, float("nan"), float("inf")):
        for now in (NOON, NOON - HOUR):
            with pytest.raises(UsageError, match="--power"):
                carbon.plan_begin(path, "5h", 3600, now, power)
