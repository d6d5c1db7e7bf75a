//! What a long command shows while it runs: memory over time in a terminal, or else lines that grow
//! rarer.

use std::io::{self, BufWriter, IsTerminal, Stderr};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam::channel::{self, Receiver, RecvTimeoutError, Sender};
use ratatui::layout::{Constraint, Layout};
use ratatui::prelude::{Backend, CrosstermBackend, Frame, Position, Style, Stylize, Terminal};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Axis, Chart, Dataset, GraphType, LegendPosition, Paragraph, Widget};
use ratatui::{TerminalOptions, Viewport};

use crate::session::Session;
use crate::text::{Bytes, one_line, plural};

/// The time between two readings.
const INTERVAL: Duration = Duration::from_millis(500);
/// The time before the first line where there is no terminal. Each later time is twice as long.
const FIRST_LINE: Duration = Duration::from_secs(1);
/// The longest time between two lines.
const LINES_AT_LEAST: Duration = Duration::from_secs(60);
/// Lines of the view.
const HEIGHT: u16 = 14;
/// Devices that the view has a line for.
const DEVICES: usize = 3;
/// Points of the chart, at most twice as many.
const POINTS: usize = 256;

/// The memory of an allocator at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Reading {
    /// The device, and the process if there may be several.
    pub(crate) name: String,
    /// Bytes that it may hold at most.
    pub(crate) limit: u64,
    pub(crate) reserved: u64,
    pub(crate) allocated: u64,
    /// External fragmentation, from 0 to 1.
    pub(crate) external: f64,
    /// Allocations since the start.
    pub(crate) allocations: u64,
    /// Refusals since the start.
    pub(crate) ooms: u64,
}

/// Readings of all allocators at one moment.
#[derive(Debug, Clone, Default)]
pub(crate) struct Now {
    pub(crate) readings: Vec<Reading>,
    /// The share of the work that is done, if known.
    pub(crate) done: Option<f64>,
}

/// What appears beside the readings.
#[derive(Debug)]
pub(crate) enum Said {
    /// A line, which scrolls away above the view.
    Line(String),
    /// The start of a line, which the view shows until the next one.
    Unfinished(String),
    /// The work is done.
    End,
}

/// Whether there is a terminal for a view: the view takes all of it, results included.
pub(crate) fn has_terminal() -> bool {
    let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    !is_dumb && io::stdout().is_terminal() && io::stderr().is_terminal()
}

/// Does the work, and shows readings meanwhile. In a terminal, the session's messages, and what the
/// work sends, appear above the view.
pub(crate) fn watch<T>(
    session: &Session,
    title: &str,
    now: impl Fn() -> Now + Sync,
    work: impl FnOnce(&Sender<Said>) -> T,
) -> T {
    let (sender, said) = channel::unbounded();
    let terminal = has_terminal().then(open).and_then(Result::ok);
    thread::scope(|scope| {
        if terminal.is_some() {
            session.divert(Some(sender.clone()));
        }
        let view = scope.spawn(|| match terminal {
            Some(terminal) => in_terminal(terminal, title, &now, &said),
            None => in_lines(session, title, &now, &said),
        });
        let done = catch_unwind(AssertUnwindSafe(|| work(&sender)));
        session.divert(None);
        // The view has ended only if it panicked.
        let _ = sender.send(Said::End);
        let _ = view.join();
        done.unwrap_or_else(|panic| resume_unwind(panic))
    })
}

fn open() -> io::Result<Terminal<CrosstermBackend<BufWriter<Stderr>>>> {
    let backend = CrosstermBackend::new(BufWriter::new(io::stderr()));
    Terminal::with_options(backend, TerminalOptions { viewport: Viewport::Inline(HEIGHT) })
}

/// Draws until the work ends. A terminal that fails shows no more.
fn in_terminal<B: Backend>(mut terminal: Terminal<B>, title: &str, now: impl Fn() -> Now, said: &Receiver<Said>) {
    let mut view = View::new(title);
    let mut next = Instant::now();
    loop {
        if Instant::now() >= next {
            view.add(now(), view.start.elapsed());
            next = Instant::now() + INTERVAL;
        }
        let _ = terminal.draw(|frame| view.draw(frame));
        while let Ok(heard) = said.recv_deadline(next) {
            if view.hear(&mut terminal, heard) {
                // What is written next begins where the view was.
                let top = terminal.get_frame().area().as_position();
                let _ = terminal.clear();
                let _ = terminal.set_cursor_position(top);
                let _ = terminal.backend_mut().flush();
                return;
            }
            // What else was said is shown before the view is drawn again.
            if said.is_empty() {
                break;
            }
        }
    }
}

/// Writes text above the view.
fn insert<B: Backend>(terminal: &mut Terminal<B>, text: &str) {
    for line in text.split('\n') {
        let line = one_line(&console::strip_ansi_codes(line).replace('\t', "    "), usize::MAX);
        let width = terminal.size().map_or(80, |size| usize::from(size.width)).max(1);
        let characters: Vec<char> = line.chars().collect();
        let rows: Vec<Line<'_>> = characters.chunks(width).map(|row| row.iter().collect::<String>().into()).collect();
        let height = u16::try_from(rows.len()).unwrap_or(u16::MAX).max(1);
        let _ = terminal.insert_before(height, |buffer| Paragraph::new(rows).render(buffer.area, buffer));
    }
}

/// Writes a line now and then until the work ends.
fn in_lines(session: &Session, title: &str, now: impl Fn() -> Now, said: &Receiver<Said>) {
    let mut view = View::new(title);
    let mut wait = FIRST_LINE;
    while let Err(RecvTimeoutError::Timeout) = said.recv_timeout(wait) {
        view.add(now(), view.start.elapsed());
        session.message(view.line());
        wait = (wait * 2).min(LINES_AT_LEAST);
    }
}

/// The readings so far, and how they are shown.
struct View<'a> {
    title: &'a str,
    start: Instant,
    /// The time of the latest readings.
    at: Duration,
    now: Now,
    /// Allocations a second since the readings before.
    rate: f64,
    trend: Trend,
    unfinished: String,
}

impl View<'_> {
    fn new(title: &str) -> View<'_> {
        let (start, now, trend) = (Instant::now(), Now::default(), Trend::default());
        View { title, start, at: Duration::ZERO, now, rate: 0.0, trend, unfinished: String::new() }
    }

    #[expect(clippy::cast_precision_loss, reason = "a rate to display")]
    fn add(&mut self, now: Now, at: Duration) {
        let allocations = now.sum(|reading| reading.allocations);
        // A new allocator begins at 0.
        let more = allocations.checked_sub(self.now.sum(|reading| reading.allocations)).unwrap_or(allocations);
        self.rate = more as f64 / (at - self.at).as_secs_f64().max(1e-3);
        self.trend.add([now.sum(|reading| reading.reserved), now.sum(|reading| reading.allocated)]);
        (self.now, self.at) = (now, at);
    }

    /// Shows what was said; true if that is the end.
    fn hear<B: Backend>(&mut self, terminal: &mut Terminal<B>, said: Said) -> bool {
        match said {
            Said::Line(line) => insert(terminal, &line),
            Said::Unfinished(start) => self.unfinished = start,
            Said::End => return true,
        }
        false
    }

    /// The time since the start, the time left, the rate and the refusals.
    fn pace(&self) -> String {
        let left = self.now.done.filter(|done| (0.001..1.0).contains(done)).map(|done| {
            let left = self.at.as_secs_f64() * (1.0 - done) / done;
            format!(" ({} left)", seconds(Duration::try_from_secs_f64(left).unwrap_or(Duration::MAX)))
        });
        let ooms = plural(self.now.sum(|reading| reading.ooms), "OOM");
        format!("{}{}, {:.0} allocations/s, {ooms}", seconds(self.at), left.unwrap_or_default(), self.rate)
    }

    /// All in a line.
    fn line(&self) -> String {
        let devices: Vec<String> = self.now.readings.iter().map(ToString::to_string).collect();
        let devices = if devices.is_empty() { NOTHING_YET.to_owned() } else { devices.join("; ") };
        format!("{}: {}: {devices}", self.title, self.pace())
    }

    fn draw(&self, frame: &mut Frame<'_>) {
        let shown = self.now.readings.len().clamp(1, DEVICES);
        let devices = Constraint::Length(u16::try_from(shown).unwrap_or(1));
        let one = Constraint::Length(1);
        let [head, chart, devices, foot] =
            Layout::vertical([one, Constraint::Fill(1), devices, one]).areas(frame.area());
        frame.render_widget(Line::from(vec![self.title.bold(), "  ".into(), self.pace().into()]), head);
        self.draw_chart(frame, chart);
        let mut lines: Vec<Line<'_>> =
            self.now.readings.iter().take(DEVICES).map(|reading| Line::from(reading.to_string())).collect();
        match self.now.readings.len() {
            0 => lines.push(NOTHING_YET.into()),
            more @ DEVICES.. if more > DEVICES => {
                lines[DEVICES - 1] = format!("and {} more", more - DEVICES + 1).into();
            }
            _ => {}
        }
        frame.render_widget(Paragraph::new(lines), devices);
        let unfinished = console::strip_ansi_codes(&self.unfinished);
        frame.render_widget(Span::from(one_line(&unfinished, usize::from(foot.width))), foot);
        // A cursor that is shown stays visible if a signal ends this process.
        frame.set_cursor_position(Position::new(foot.x, foot.y));
    }

    #[expect(clippy::cast_precision_loss, reason = "points of a chart")]
    fn draw_chart(&self, frame: &mut Frame<'_>, area: ratatui::layout::Rect) {
        let [reserved, allocated] = [0, 1].map(|which| self.trend.line(which));
        let most = self.trend.points.iter().map(|point| point[0].max(point[1])).max().unwrap_or(0).max(1);
        let across = self.trend.points.len().max(2) as f64 - 1.0;
        let line = |name, points, style| {
            Dataset::default().name(name).marker(Marker::Braille).graph_type(GraphType::Line).style(style).data(points)
        };
        let chart = Chart::new(vec![
            line("reserved", &reserved, Style::new().yellow()),
            line("allocated", &allocated, Style::new().cyan()),
        ])
        .x_axis(Axis::default().bounds([0.0, across]).labels(["0 s".to_owned(), seconds(self.at)]))
        .y_axis(
            Axis::default()
                .bounds([0.0, most as f64 * 1.02])
                .labels([Bytes(0), Bytes(most / 2), Bytes(most)].map(|bytes| bytes.to_string())),
        )
        .legend_position(Some(LegendPosition::BottomRight))
        .hidden_legend_constraints((Constraint::Percentage(60), Constraint::Percentage(80)));
        frame.render_widget(chart, area);
    }
}

const NOTHING_YET: &str = "no memory yet";

/// A time to the second.
fn seconds(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds / 60 {
        0 => format!("{seconds} s"),
        minutes @ 1..60 => format!("{minutes} min {} s", seconds % 60),
        minutes => format!("{} h {} min", minutes / 60, minutes % 60),
    }
}

impl Now {
    fn sum(&self, figure: fn(&Reading) -> u64) -> u64 {
        self.readings.iter().map(figure).fold(0, u64::saturating_add)
    }
}

impl std::fmt::Display for Reading {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (reserved, limit, allocated) = (Bytes(self.reserved), Bytes(self.limit), Bytes(self.allocated));
        let percent = self.external * 100.0;
        write!(f, "{} reserved {reserved} of {limit}, allocated {allocated}, fragmentation {percent:.0} %", self.name)
    }
}

/// Bytes reserved and allocated over the whole time: the most in each of equal times.
#[derive(Debug, Default)]
struct Trend {
    points: Vec<[u64; 2]>,
    /// Readings of a point, as a power of two.
    doublings: u32,
    /// Readings of the last point.
    last: u64,
}

impl Trend {
    fn add(&mut self, reading: [u64; 2]) {
        let is_full = self.last == 1 << self.doublings;
        match self.points.last_mut() {
            Some(point) if !is_full => {
                *point = most(*point, reading);
                self.last += 1;
            }
            _ => {
                if self.points.len() >= 2 * POINTS {
                    self.points = self.points.chunks(2).map(|pair| pair.iter().copied().fold([0; 2], most)).collect();
                    self.doublings += 1;
                }
                self.points.push(reading);
                self.last = 1;
            }
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "points of a chart")]
    fn line(&self, which: usize) -> Vec<(f64, f64)> {
        self.points.iter().enumerate().map(|(at, point)| (at as f64, point[which] as f64)).collect()
    }
}

fn most(one: [u64; 2], other: [u64; 2]) -> [u64; 2] {
    [one[0].max(other[0]), one[1].max(other[1])]
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::backend::TestBackend;

    fn reading(allocations: u64) -> Reading {
        let (limit, reserved, allocated) = (8 << 30, 3 << 30, 2 << 30);
        Reading { name: "cuda:0".into(), limit, reserved, allocated, external: 0.125, allocations, ooms: 1 }
    }

    fn view_of(readings: Vec<Reading>) -> View<'static> {
        let mut view = View::new("soak");
        view.add(Now::default(), Duration::from_secs(60));
        view.add(Now { readings, done: Some(0.25) }, Duration::from_secs(62));
        view
    }

    /// The screen after drawing in a terminal of this width.
    fn drawn(view: &View<'_>, width: u16) -> String {
        let options = TerminalOptions { viewport: Viewport::Inline(HEIGHT) };
        let mut terminal = Terminal::with_options(TestBackend::new(width, HEIGHT), options).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn a_line_has_the_pace_and_each_device() {
        let line = view_of(vec![reading(3_000)]).line();
        assert_eq!(
            line,
            "soak: 1 min 2 s (3 min 6 s left), 1500 allocations/s, 1 OOM: cuda:0 reserved 3.00 GiB of 8.00 GiB, \
             allocated 2.00 GiB, fragmentation 12 %"
        );
        assert!(view_of(vec![]).line().ends_with("0 allocations/s, 0 OOMs: no memory yet"));
    }

    #[test]
    fn a_view_has_a_chart_and_a_line_for_each_device_in_any_width() {
        let screen = drawn(&view_of(vec![reading(10)]), 90);
        for part in ["soak  1 min 2 s", "3.00 GiB│", "1.50 GiB│", "reserved", "cuda:0 reserved 3.00 GiB"] {
            assert!(screen.contains(part), "{part}:\n{screen}");
        }
        let screen = drawn(&view_of(vec![reading(10); 5]), 90);
        assert_eq!((screen.matches("cuda:0").count(), screen.matches("and 3 more").count()), (2, 1), "{screen}");
        for width in 1..40 {
            drawn(&view_of(vec![reading(10); 3]), width);
        }
    }

    #[test]
    fn lines_scroll_away_above_the_view_without_their_colours() {
        let options = TerminalOptions { viewport: Viewport::Inline(HEIGHT) };
        let mut terminal = Terminal::with_options(TestBackend::new(60, HEIGHT + 4), options).unwrap();
        let mut view = view_of(vec![]);
        for line in ["first", "\u{1b}[31mred\u{1b}[0m\tand\u{7} a bell", "one\ntwo"] {
            assert!(!view.hear(&mut terminal, Said::Line(line.to_owned())));
        }
        assert!(!view.hear(&mut terminal, Said::Unfinished(" 3%|#".to_owned())));
        terminal.draw(|frame| view.draw(frame)).unwrap();
        assert!(view.hear(&mut terminal, Said::End));
        let screen = terminal.backend().to_string();
        let lines: Vec<&str> = screen.lines().map(|line| line.trim_matches('"').trim_end()).collect();
        assert_eq!(lines[..4], ["first", "red    and\u{fffd} a bell", "one", "two"], "{screen}");
        assert_eq!(lines.last(), Some(&" 3%|#"), "{screen}");
    }

    #[test]
    fn the_trend_keeps_every_peak_in_few_points() {
        let mut trend = Trend::default();
        for number in 0..100_000_u64 {
            trend.add([if number == 77_777 { 9 } else { number % 3 }, number % 2]);
            assert!(trend.points.len() <= 2 * POINTS);
        }
        assert!(trend.points.len() > POINTS / 2);
        assert_eq!(trend.points.iter().filter(|point| point[0] == 9).count(), 1);
        assert!(trend.points.iter().all(|point| point[0] >= 2 && point[1] == 1));
    }
}
