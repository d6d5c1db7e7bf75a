//! What a long command shows while it runs: memory over time in a terminal, otherwise lines at
//! growing intervals.

mod terminal;
mod trend;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam::channel::{self, Receiver, RecvTimeoutError, Sender};
use ratatui::backend::ClearType;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::prelude::{Backend, Frame, Position, Style, Stylize, Terminal};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Axis, Chart, Dataset, GraphType, LegendPosition, Paragraph};

use crate::session::{Output, Session};
use crate::text::{Bytes, one_line, plural, wrap};
use terminal::{at_continuation, insert, open};
use trend::Trend;

/// The time between two readings.
const INTERVAL: Duration = Duration::from_millis(500);
/// The time before the first line where there is no view. Each later time is twice as long.
const FIRST_LINE: Duration = Duration::from_secs(1);
/// The longest time between two lines.
const LINES_AT_LEAST: Duration = Duration::from_secs(60);
/// Rows of the view in a terminal that has room for them.
const HEIGHT: u16 = 14;
/// Rows below which the chart is left out: two of them are its axis.
const CHART_MIN: u16 = 5;
/// Devices that the view has a row for.
const DEVICES: usize = 3;
/// Output that waits to be shown. Who writes more waits.
const OUTPUTS: usize = 1024;

/// The memory of an allocator at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Reading {
    /// The device, and the process if there may be several.
    pub(crate) name: String,
    /// Bytes that it may hold at most.
    pub(crate) limit: u64,
    pub(crate) reserved: u64,
    pub(crate) allocated: u64,
    /// The share of what is held that is free beside live blocks and cannot go back, from 0 to 1.
    pub(crate) stranded: f64,
    /// Allocations of this allocator.
    pub(crate) allocations: u64,
    /// Refusals of this allocator.
    pub(crate) ooms: u64,
}

/// Readings of all allocators at one moment.
#[derive(Debug, Clone, Default)]
pub(crate) struct Progress {
    pub(crate) readings: Vec<Reading>,
}

/// Does the work, and shows its progress meanwhile. Where there is a view, the session's messages
/// appear above it, as does what the work sends; the work gets no sender where there is none.
pub(crate) fn watch<T>(
    session: &Session,
    title: &str,
    progress: impl Fn() -> Progress + Sync,
    work: impl FnOnce(Option<&Sender<Output>>) -> T,
) -> T {
    let (sender, output) = channel::bounded(OUTPUTS);
    let terminal = open(HEIGHT, false);
    let continued = at_continuation();
    // Below what the shell wrote while this process was stopped, or on an empty screen, as
    // terminals break the lines of a view differently when they get narrower.
    let reopen = |is_resized: bool| match continued.swap(false, Ordering::Relaxed) {
        false if !is_resized => None,
        _ => open(HEIGHT, is_resized),
    };
    let has_view = terminal.is_some();
    thread::scope(|scope| {
        if has_view {
            session.divert(Some(sender.clone()));
        }
        let progress = &progress;
        // The view owns the receiver: if it panics, senders learn that nobody listens.
        let view = scope.spawn(move || match terminal {
            Some(terminal) => in_terminal(terminal, title, progress, &output, reopen),
            None => in_lines(session, title, progress, &output),
        });
        let done = catch_unwind(AssertUnwindSafe(|| work(has_view.then_some(&sender))));
        session.divert(None);
        let _ = sender.send(Output::End);
        let _ = view.join();
        done.unwrap_or_else(|panic| resume_unwind(panic))
    })
}

/// Draws until the work ends. A terminal that fails shows no more. `reopen` gets whether the
/// terminal has another size than the view was drawn for, and gives another view if one has to be
/// drawn.
fn in_terminal<B: Backend>(
    mut terminal: Terminal<B>,
    title: &str,
    progress: impl Fn() -> Progress,
    output: &Receiver<Output>,
    reopen: impl Fn(bool) -> Option<Terminal<B>>,
) {
    let mut view = View::new(title);
    let mut next = Instant::now();
    let mut size = terminal.size().ok();
    let mut is_shown = true;
    loop {
        let now = terminal.size().ok();
        match reopen(now != size) {
            Some(again) => (terminal, is_shown) = (again, true),
            None => is_shown &= now == size,
        }
        size = now;
        if Instant::now() >= next {
            view.add(progress(), view.start.elapsed());
            next = Instant::now() + INTERVAL;
            if is_shown && !view.partial.is_empty() {
                // The answer to a question may have been typed into the view.
                let _ = terminal.clear();
            }
        }
        // A terminal that became too small for the view shows none until it is larger.
        if is_shown {
            let _ = terminal.draw(|frame| view.draw(frame));
        }
        while let Ok(more) = output.recv_deadline(next) {
            if view.show(&mut terminal, more) {
                // What is written next begins where the view was.
                let top = terminal.get_frame().area().as_position();
                let backend = terminal.backend_mut();
                let _ = backend.set_cursor_position(top);
                let _ = backend.clear_region(ClearType::AfterCursor);
                let _ = backend.flush();
                return;
            }
            // Output that waits is written before the view is drawn again, but not for long.
            if output.is_empty() || Instant::now() >= next {
                break;
            }
        }
    }
}

/// Writes a line now and then until the work ends.
fn in_lines(session: &Session, title: &str, progress: impl Fn() -> Progress, output: &Receiver<Output>) {
    let mut view = View::new(title);
    let mut wait = FIRST_LINE;
    while let Err(RecvTimeoutError::Timeout) = output.recv_timeout(wait) {
        view.add(progress(), view.start.elapsed());
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
    progress: Progress,
    /// Allocations a second since the readings before.
    rate: f64,
    /// Refusals of all allocators so far.
    ooms: u64,
    trend: Trend,
    partial: String,
}

impl View<'_> {
    fn new(title: &str) -> View<'_> {
        let (start, progress, trend) = (Instant::now(), Progress::default(), Trend::default());
        View { title, start, at: Duration::ZERO, progress, rate: 0.0, ooms: 0, trend, partial: String::new() }
    }

    #[expect(clippy::cast_precision_loss, reason = "a rate to display")]
    fn add(&mut self, progress: Progress, at: Duration) {
        let more = |figure| progress.more_than(&self.progress, figure);
        let (allocations, ooms) = (more(|reading| reading.allocations), more(|reading| reading.ooms));
        self.rate = allocations as f64 / (at.saturating_sub(self.at)).as_secs_f64().max(1e-3);
        self.ooms = self.ooms.saturating_add(ooms);
        let sums = [progress.sum(|reading| reading.reserved), progress.sum(|reading| reading.allocated)];
        self.trend.add(at.as_secs_f64(), sums);
        (self.progress, self.at) = (progress, at);
    }

    /// Shows output; true if that is the end.
    fn show<B: Backend>(&mut self, terminal: &mut Terminal<B>, output: Output) -> bool {
        match output {
            Output::Line(line) => insert(terminal, &line),
            Output::Partial(start) => self.partial = start,
            Output::End => return true,
        }
        false
    }

    /// The time since the start, the rate and the refusals.
    fn pace(&self) -> String {
        format!("{}, {:.0} allocations/s, {}", seconds(self.at), self.rate, plural(self.ooms, "OOM"))
    }

    /// All in a line.
    fn line(&self) -> String {
        let devices: Vec<String> = self.progress.readings.iter().map(ToString::to_string).collect();
        let devices = if devices.is_empty() { NOTHING_YET.to_owned() } else { devices.join("; ") };
        format!("{}: {}: {devices}", self.title, self.pace())
    }

    fn draw(&self, frame: &mut Frame<'_>) {
        let readings = &self.progress.readings;
        let mut texts: Vec<String> = readings.iter().take(DEVICES).map(ToString::to_string).collect();
        match readings.len() {
            0 => texts.push(NOTHING_YET.to_owned()),
            more if more > DEVICES => texts[DEVICES - 1] = format!("and {} more", more - DEVICES + 1),
            _ => {}
        }
        let width = usize::from(frame.area().width);
        let rows = |text: &str| wrap(text, width).lines().map(str::to_owned).collect::<Vec<_>>();
        let mut head: Vec<Line<'_>> =
            rows(&format!("{} {}", self.title, self.pace())).into_iter().map(Line::from).collect();
        if let Some(first) = head.first_mut()
            && let Some(pace) = first.to_string().strip_prefix(self.title)
        {
            *first = Line::from(vec![self.title.bold(), pace.to_owned().into()]);
        }
        let texts: Vec<Line<'_>> = texts.iter().flat_map(|text| rows(text)).map(Line::from).collect();
        let rows = |lines: &[Line<'_>]| Constraint::Length(u16::try_from(lines.len()).unwrap_or(u16::MAX));
        let [top, chart, devices, foot] =
            Layout::vertical([rows(&head), Constraint::Fill(1), rows(&texts), Constraint::Length(1)])
                .areas(frame.area());
        frame.render_widget(Paragraph::new(head), top);
        self.draw_chart(frame, chart);
        frame.render_widget(Paragraph::new(texts), devices);
        let partial = console::strip_ansi_codes(&self.partial);
        let partial = Span::from(one_line(&partial, usize::from(foot.width)));
        // A cursor that is shown stays visible if a signal ends this process. Answers are typed
        // there.
        let behind = u16::try_from(partial.width()).unwrap_or(u16::MAX).min(foot.width.saturating_sub(1));
        frame.set_cursor_position(Position::new(foot.x + behind, foot.y));
        frame.render_widget(partial, foot);
    }

    #[expect(clippy::cast_precision_loss, reason = "points of a chart")]
    fn draw_chart(&self, frame: &mut Frame<'_>, area: Rect) {
        let [reserved, allocated] = [0, 1].map(|which| self.trend.line(which));
        let most = self.trend.most();
        if most == 0 || area.height < CHART_MIN {
            return;
        }
        let line = |name, points, style| {
            Dataset::default().name(name).marker(Marker::Braille).graph_type(GraphType::Line).style(style).data(points)
        };
        let chart = Chart::new(vec![
            line("held", &reserved, Style::new().yellow()),
            line("allocated", &allocated, Style::new().cyan()),
        ])
        .x_axis(Axis::default().bounds([0.0, self.at.as_secs_f64()]).labels(["0 s".to_owned(), seconds(self.at)]))
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

impl Progress {
    /// By how much a figure has grown. An allocator with fewer allocations than before is a new
    /// one.
    fn more_than(&self, before: &Progress, figure: fn(&Reading) -> u64) -> u64 {
        let more = |new: &Reading| {
            let is_same = |old: &&Reading| old.name == new.name && old.allocations <= new.allocations;
            figure(new).saturating_sub(before.readings.iter().find(is_same).map_or(0, figure))
        };
        self.readings.iter().map(more).fold(0, u64::saturating_add)
    }

    fn sum(&self, figure: fn(&Reading) -> u64) -> u64 {
        self.readings.iter().map(figure).fold(0, u64::saturating_add)
    }
}

impl std::fmt::Display for Reading {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (reserved, limit, allocated) = (Bytes(self.reserved), Bytes(self.limit), Bytes(self.allocated));
        let percent = self.stranded * 100.0;
        write!(f, "{} holds {reserved} of {limit}, {allocated} allocated, {percent:.0} % fragmented", self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::terminal::AtBottom;
    use super::*;
    use ratatui::backend::TestBackend;
    use ratatui::{TerminalOptions, Viewport};

    fn reading(allocations: u64) -> Reading {
        let (limit, reserved, allocated) = (8 << 30, 3 << 30, 2 << 30);
        Reading { name: "cuda:0".into(), limit, reserved, allocated, stranded: 0.125, allocations, ooms: 1 }
    }

    fn view_of(readings: Vec<Reading>) -> View<'static> {
        let mut view = View::new("train");
        view.add(Progress::default(), Duration::from_secs(60));
        view.add(Progress { readings }, Duration::from_secs(62));
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
            "train: 1 min 2 s, 1500 allocations/s, 1 OOM: cuda:0 holds 3.00 GiB of \
             8.00 GiB, 2.00 GiB allocated, 12 % fragmented"
        );
        assert!(view_of(vec![]).line().ends_with("0 allocations/s, 0 OOMs: no memory yet"));
    }

    #[test]
    fn a_view_has_a_chart_and_a_line_for_each_device_in_any_width() {
        let screen = drawn(&view_of(vec![reading(10)]), 90);
        for part in ["train 1 min 2 s", "3.00 GiB│", "1.50 GiB│", "held", "cuda:0 holds 3.00 GiB of 8.00 GiB"] {
            assert!(screen.contains(part), "{part}:\n{screen}");
        }
        let screen = drawn(&view_of(vec![reading(10); 5]), 90);
        assert_eq!((screen.matches("cuda:0").count(), screen.matches("and 3 more").count()), (2, 1), "{screen}");
        for width in 1..40 {
            drawn(&view_of(vec![reading(10); 3]), width);
        }
    }

    #[test]
    fn a_view_of_40_columns_cuts_no_text() {
        let view = view_of(vec![reading(10); 3]);
        let screen = drawn(&view, 40);
        let words: Vec<&str> =
            screen.lines().map(|line| line.trim_matches('"')).flat_map(str::split_whitespace).collect();
        let shown = words.join(" ");
        assert!(shown.contains(&format!("train {}", view.pace())), "{screen}");
        assert_eq!(shown.matches(&reading(10).to_string()).count(), 3, "{screen}");
        assert!(screen.contains("9.00 GiB│"), "{screen}");
    }

    #[test]
    fn a_terminal_of_another_size_gets_another_view() {
        let (sender, output) = channel::bounded(OUTPUTS);
        let view = |width| {
            let options = TerminalOptions { viewport: Viewport::Inline(HEIGHT) };
            Terminal::with_options(AtBottom(TestBackend::new(width, HEIGHT + 4)), options).unwrap()
        };
        let asked = std::cell::RefCell::new(Vec::new());
        let reopen = |is_resized| {
            asked.borrow_mut().push(is_resized);
            if asked.borrow().len() == 2 {
                let _ = sender.send(Output::End);
            }
            (asked.borrow().len() == 1).then(|| view(44))
        };
        in_terminal(view(60), "train", Progress::default, &output, reopen);
        assert_eq!(*asked.borrow(), [false, true], "the second view has another size than the first");
    }

    #[test]
    fn a_view_fits_in_any_height() {
        for height in 1..=HEIGHT {
            let options = TerminalOptions { viewport: Viewport::Inline(height) };
            let mut terminal = Terminal::with_options(AtBottom(TestBackend::new(50, height)), options).unwrap();
            terminal.draw(|frame| view_of(vec![reading(10)]).draw(frame)).unwrap();
            let has_chart = terminal.backend().0.to_string().contains('│');
            assert_eq!(has_chart, height >= 9, "three rows of text, and six of a chart: {height}");
        }
    }

    #[test]
    fn figures_add_up_over_allocators_that_come_and_go() {
        let named = |name: &str, allocations, ooms| Reading { name: name.into(), ooms, ..reading(allocations) };
        let mut view = View::new("run");
        let mut add = |readings, second| {
            view.add(Progress { readings }, Duration::from_secs(second));
            (view.rate, view.ooms)
        };
        assert_eq!(add(vec![named("1", 1_000, 2), named("2", 2_000, 1)], 1), (3_000.0, 3));
        assert_eq!(add(vec![named("2", 2_500, 1)], 2), (500.0, 3), "one has ended");
        assert_eq!(add(vec![named("2", 30, 1), named("3", 5, 0)], 3), (35.0, 4), "one began anew");
    }

    #[test]
    fn output_that_never_pauses_does_not_keep_readings_away() {
        let (sender, output) = channel::bounded(OUTPUTS);
        let asked = std::sync::atomic::AtomicUsize::new(0);
        let progress = || {
            asked.fetch_add(1, Ordering::Relaxed);
            Progress::default()
        };
        thread::scope(|scope| {
            scope.spawn(|| {
                // Until there were two readings.
                while asked.load(Ordering::Relaxed) < 2 {
                    let _ = sender.send(Output::Line("y".to_owned()));
                }
                let _ = sender.send(Output::End);
            });
            let options = TerminalOptions { viewport: Viewport::Inline(HEIGHT) };
            let terminal = Terminal::with_options(AtBottom(TestBackend::new(40, HEIGHT + 4)), options).unwrap();
            in_terminal(terminal, "yes", progress, &output, |_| None);
        });
    }

    #[test]
    fn lines_scroll_away_above_the_view_without_their_colours() {
        let options = TerminalOptions { viewport: Viewport::Inline(HEIGHT) };
        let mut terminal = Terminal::with_options(TestBackend::new(60, HEIGHT + 4), options).unwrap();
        let mut view = view_of(vec![]);
        for line in ["first", "\u{1b}[31mred\u{1b}[0m\tand\u{7} a bell", "one\ntwo"] {
            assert!(!view.show(&mut terminal, Output::Line(line.to_owned())));
        }
        assert!(!view.show(&mut terminal, Output::Partial(" 3%|#".to_owned())));
        terminal.draw(|frame| view.draw(frame)).unwrap();
        assert!(view.show(&mut terminal, Output::End));
        let screen = terminal.backend().to_string();
        let lines: Vec<&str> = screen.lines().map(|line| line.trim_matches('"').trim_end()).collect();
        assert_eq!(lines[..4], ["first", "red    and\u{fffd} a bell", "one", "two"], "{screen}");
        assert_eq!(lines.last(), Some(&" 3%|#"), "{screen}");
    }
}
