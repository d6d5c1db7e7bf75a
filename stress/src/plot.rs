//! Figures as plots, in SVG files.
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_precision_loss,
    reason = "pixels, and counts of what a figure shows"
)]

use std::io;
use std::ops::Range;
use std::path::Path;

use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};
use plotters::coord::{Shift, cartesian::Cartesian2d};
use plotters::element::{DynElement, IntoDynElement};
use plotters::prelude::*;

use crate::exit::Failure;
use crate::output;
use crate::session::Session;

/// An axis of values.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Axis {
    /// What it shows, and in which unit.
    pub(crate) name: &'static str,
    /// Whether equal distances are equal ratios. Then only positive values are shown.
    pub(crate) is_logarithmic: bool,
    /// A value that the axis shows even if no mark is there.
    pub(crate) from: Option<f64>,
}

/// A mark for each series at two figures, of both of which less is better.
#[derive(Debug)]
pub(crate) struct Points<'a> {
    pub(crate) title: &'a str,
    pub(crate) across: Axis,
    pub(crate) up: Axis,
    pub(crate) series: Vec<(&'a str, f64, f64)>,
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), DrawingAreaErrorKind<io::Error>>;

/// Colours that the colour-blind can tell apart (by Okabe and Ito).
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
    RGBColor(90, 90, 90),
];
const FONT: &str = "sans-serif";
const TEXT: u32 = 14;
/// Pixels of a line of text.
const LINE: u32 = 20;
const MARGIN: u32 = 12;

/// Writes points as a plot, with the frontier: the points that no other one beats in both figures.
/// Of none at all, there is a message instead.
///
/// # Errors
/// When the file cannot be written.
pub(crate) fn save_points(session: &Session, points: &Points<'_>, path: &Path) -> Result<(), Failure> {
    let Points { title, across, up, series } = points;
    let placed = |&(_, x, y): &(&str, f64, f64)| Some((across.place(x)?, up.place(y)?));
    let places: Vec<Option<(f64, f64)>> = series.iter().map(placed).collect();
    let (xs, ys) = (places.iter().flatten().map(|at| at.0), places.iter().flatten().map(|at| at.1));
    let (Some(xs), Some(ys)) = (across.scale(xs), up.scale(ys)) else {
        session.message("no plot: nothing was measured");
        return Ok(());
    };
    let legend = LINE * (series.len() as u32 + 3);
    let names: Vec<&str> = series.iter().map(|one| one.0).collect();
    let width = (label_width(&names) + 5 * MARGIN).max(760);
    save(session, path, title, (width, legend + 420), |area| {
        let (head, body) = area.split_vertically(legend);
        draw_legend(&titled(&head, title)?, &names.iter().copied().enumerate().collect::<Vec<_>>())?;
        let mut chart = chart(&body, None, 60, (xs.clone(), across.name), (ys, up.name))?;
        let steps = frontier(places.iter().flatten().copied().collect(), xs.range.end);
        chart.draw_series(LineSeries::new(steps, BLACK.mix(0.4).stroke_width(1)))?;
        chart.draw_series(places.iter().enumerate().filter_map(|(number, at)| Some(mark((*at)?, number))))?;
        Ok(())
    })
}

/// The steps along the points that no other one beats in both figures, from the left to `end`.
fn frontier(mut places: Vec<(f64, f64)>, end: f64) -> Vec<(f64, f64)> {
    places.sort_by(|one, other| one.0.total_cmp(&other.0).then(one.1.total_cmp(&other.1)));
    let mut steps: Vec<(f64, f64)> = Vec::new();
    for (x, y) in places {
        match steps.last().copied() {
            Some((_, least)) if y >= least => {}
            Some((_, least)) => steps.extend([(x, least), (x, y)]),
            None => steps.push((x, y)),
        }
    }
    steps.extend(steps.last().map(|&(_, least)| (end, least)));
    steps
}

/// Draws on white and writes what is drawn.
fn save(
    session: &Session,
    path: &Path,
    title: &str,
    size: (u32, u32),
    draw: impl FnOnce(&Area<'_>) -> Drawn,
) -> Result<(), Failure> {
    let mut svg = String::new();
    let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
    let drawn = area.fill(&WHITE).and_then(|()| draw(&area)).and_then(|()| area.present());
    drop(area);
    drawn.map_err(|error| Failure::Output(io::Error::other(error.to_string())))?;
    // Screen readers say the title.
    let title = title.replace('&', "&amp;").replace('<', "&lt;");
    let svg = svg.replacen('>', &format!(" role=\"img\"><title>{title}</title>"), 1);
    output::write(path, &svg)?;
    session.message(format_args!("plot: {}", path.display()));
    Ok(())
}

/// The chart of an area, with its grid and the labels of its axes, under `caption` if it has one.
/// `left` pixels are for the labels of the upright axis.
fn chart<'a>(
    area: &Area<'a>,
    caption: Option<&str>,
    left: u32,
    (xs, across): (Scale, &str),
    (ys, up): (Scale, &str),
) -> Result<ChartContext<'a, SVGBackend<'a>, Cartesian2d<Scale, Scale>>, DrawingAreaErrorKind<io::Error>> {
    let mut chart = ChartBuilder::on(area);
    if let Some(caption) = caption {
        chart.caption(caption, (FONT, TEXT));
    }
    chart.margin(MARGIN).x_label_area_size(3 * LINE).y_label_area_size(left);
    let mut chart = chart.build_cartesian_2d(xs, ys)?;
    let mut mesh = chart.configure_mesh();
    mesh.light_line_style(TRANSPARENT).bold_line_style(BLACK.mix(0.12)).label_style((FONT, TEXT));
    mesh.x_desc(across).y_desc(up).draw()?;
    Ok(chart)
}

/// Writes the title and returns the area below it.
fn titled<'a>(area: &Area<'a>, title: &str) -> Result<Area<'a>, DrawingAreaErrorKind<io::Error>> {
    let (top, below) = area.split_vertically(2 * LINE);
    top.draw(&Text::new(title.to_owned(), (MARGIN as i32, MARGIN as i32), (FONT, TEXT + 4).into_font()))?;
    Ok(below)
}

/// About the width of the longest of these texts.
fn label_width(texts: &[&str]) -> u32 {
    texts.iter().map(|text| text.chars().count() as u32).max().unwrap_or(0) * TEXT * 6 / 10 + MARGIN
}

/// A mark in the colour and shape of this number.
fn mark<'a, C: Clone + 'static>(at: C, number: usize) -> DynElement<'static, SVGBackend<'a>, C>
where
    Circle<C, i32>: IntoDynElement<'static, SVGBackend<'a>, C>,
    TriangleMarker<C, i32>: IntoDynElement<'static, SVGBackend<'a>, C>,
    Cross<C, i32>: IntoDynElement<'static, SVGBackend<'a>, C>,
{
    let colour = COLOURS[number % COLOURS.len()];
    match number % 3 {
        0 => Circle::new(at, 4, colour.filled()).into_dyn(),
        1 => TriangleMarker::new(at, 5, colour.filled()).into_dyn(),
        _ => Cross::new(at, 4, colour.stroke_width(2)).into_dyn(),
    }
}

/// The names with the marks of these numbers, one below the other.
fn draw_legend(area: &Area<'_>, names: &[(usize, &str)]) -> Drawn {
    for (place, (number, name)) in names.iter().enumerate() {
        let y = (LINE * place as u32 + LINE / 2) as i32;
        area.draw(&mark((2 * MARGIN as i32, y), *number))?;
        area.draw(&Text::new((*name).to_owned(), (3 * MARGIN as i32, y - 8), (FONT, TEXT).into_font()))?;
    }
    Ok(())
}

impl Axis {
    /// Where the value is on the axis.
    fn place(self, value: f64) -> Option<f64> {
        let place = if self.is_logarithmic { value.log10() } else { value };
        place.is_finite().then_some(place)
    }

    /// From the least to the greatest place, with some room. `None` without places.
    fn scale(self, places: impl Iterator<Item = f64>) -> Option<Scale> {
        let from = self.from.and_then(|from| self.place(from));
        let (least, most) = places.fold(None, |range: Option<(f64, f64)>, place| {
            let (least, most) = range.unwrap_or((place, place));
            Some((least.min(place), most.max(place)))
        })?;
        let (least, most) = (from.map_or(least, |from| from.min(least)), from.map_or(most, |from| from.max(most)));
        let room = ((most - least) * 0.05).max(if self.is_logarithmic { 0.1 } else { most.abs().max(1e-3) * 0.01 });
        let range = least - room..most + room;
        let ticks = self.ticks(&range).into_iter().map(|tick| (tick, self.label(tick))).collect();
        Some(Scale { range, ticks })
    }

    /// Places of round values in the range.
    fn ticks(self, range: &Range<f64>) -> Vec<f64> {
        let span = range.end - range.start;
        if self.is_logarithmic {
            let steps: &[f64] = match span {
                ..0.7 => &[1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0],
                ..2.0 => &[1.0, 2.0, 5.0],
                _ => &[1.0],
            };
            let decades = range.start.floor() as i32..=range.end.floor() as i32;
            let ticks = decades.flat_map(|decade| steps.iter().map(move |step| f64::from(decade) + step.log10()));
            return ticks.filter(|tick| range.contains(tick)).collect();
        }
        let decade = 10_f64.powf((span / 3.0).log10().floor());
        let step =
            [5.0, 2.0, 1.0].map(|step| step * decade).into_iter().find(|step| span / step >= 3.0).unwrap_or(decade);
        let first = (range.start / step).ceil() as i64;
        let last = (range.end / step).floor() as i64;
        (first..=last).map(|number| number as f64 * step).collect()
    }

    /// The value at a place.
    fn label(self, place: f64) -> String {
        let value = if self.is_logarithmic { 10_f64.powf(place) } else { place };
        // Rounded to four digits, as places are not exact.
        let digits = 10_f64.powf(3.0 - value.abs().max(1e-9).log10().floor());
        let value = (value * digits).round() / digits;
        match value.abs() {
            1e9.. => format!("{} G", value / 1e9),
            1e6.. => format!("{} M", value / 1e6),
            1e4.. => format!("{} k", value / 1e3),
            _ => value.to_string(),
        }
    }
}

/// Places from the left or bottom to the right or top, with the labels of some.
#[derive(Clone)]
struct Scale {
    range: Range<f64>,
    ticks: Vec<(f64, String)>,
}

impl Ranged for Scale {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, place: &f64, (from, to): (i32, i32)) -> i32 {
        let share = (place - self.range.start) / (self.range.end - self.range.start);
        from + (share * f64::from(to - from)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.ticks.iter().map(|tick| tick.0).collect()
    }

    fn range(&self) -> Range<f64> {
        self.range.clone()
    }
}

impl ValueFormatter<f64> for Scale {
    fn format_ext(&self, place: &f64) -> String {
        self.ticks.iter().find(|tick| tick.0 == *place).map_or_else(String::new, |tick| tick.1.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Global;

    const LINEAR: Axis = Axis { name: "ratio", is_logarithmic: false, from: Some(1.0) };
    const LOGARITHMIC: Axis = Axis { name: "ns", is_logarithmic: true, from: None };

    fn drawn(draw: impl FnOnce(&Session, &Path) -> Result<(), Failure>) -> String {
        let path = std::env::temp_dir().join(format!(
            "aquifer-plot-{}-{:?}.svg",
            std::process::id(),
            std::thread::current().id()
        ));
        draw(&Session::without_device(&Global::default()).unwrap(), &path).unwrap();
        let svg = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        svg
    }

    fn labels(axis: Axis, places: &[f64]) -> Vec<String> {
        axis.scale(places.iter().copied()).unwrap().ticks.into_iter().map(|tick| tick.1).collect()
    }

    #[test]
    fn ticks_are_round_values_in_the_range() {
        assert_eq!(labels(LINEAR, &[1.02, 1.27]), ["1", "1.05", "1.1", "1.15", "1.2", "1.25"]);
        assert_eq!(labels(LINEAR, &[4.9]), ["1", "2", "3", "4", "5"]);
        assert_eq!(labels(LINEAR, &[1.0]), ["0.99", "0.995", "1", "1.005", "1.01"]);
        assert_eq!(labels(LOGARITHMIC, &[1.5, 2.7]), ["50", "100", "200", "500"]);
        assert_eq!(labels(LOGARITHMIC, &[1.45, 1.54]), ["30", "40"]);
        assert_eq!(labels(LOGARITHMIC, &[0.0, 7.0]), ["1", "10", "100", "1000", "10 k", "100 k", "1 M", "10 M"]);
        assert!(LINEAR.scale([].into_iter()).is_none());
    }

    #[test]
    fn the_frontier_leaves_out_points_that_another_one_beats() {
        let steps = frontier(vec![(3.0, 1.0), (1.0, 4.0), (2.0, 5.0), (2.0, 2.0), (4.0, 1.0)], 9.0);
        assert_eq!(steps, [(1.0, 4.0), (2.0, 4.0), (2.0, 2.0), (3.0, 2.0), (3.0, 1.0), (9.0, 1.0)]);
        let series = vec![("one", 10.0, 1.5), ("two", 100.0, 1.1), ("none", 0.0, 1.0)];
        let points = Points { title: "a < b & c", across: LOGARITHMIC, up: LINEAR, series };
        let svg = drawn(|session, path| save_points(session, &points, path));
        assert!(svg.contains("role=\"img\"><title>a &lt; b &amp; c</title>"), "{svg}");
        // One of each is in the legend.
        let marks = ["<circle", "<polygon"].map(|mark| svg.matches(mark).count());
        assert_eq!((marks, svg.matches("<polyline").count() >= 1), ([2, 2], true), "no logarithm of 0: {svg}");
        assert!([">one<", ">two<", ">ratio<", ">ns<"].iter().all(|text| svg.replace('\n', "").contains(text)), "{svg}");
    }

    #[test]
    fn nothing_to_draw_is_no_failure() {
        let points = Points { title: "title", across: LOGARITHMIC, up: LINEAR, series: Vec::new() };
        let session = Session::without_device(&Global::default()).unwrap();
        save_points(&session, &points, "/no/such/folder/x.svg".as_ref()).unwrap();
    }
}
