//! The terminal of a view, and the text above it.

use std::io::{self, BufWriter, IsTerminal, Stderr};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use ratatui::backend::{ClearType, WindowSize};
use ratatui::buffer::Cell;
use ratatui::layout::{Position, Size};
use ratatui::prelude::{Backend, CrosstermBackend, Terminal};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Paragraph, Widget};
use ratatui::{TerminalOptions, Viewport};

use crate::text::one_line;

/// Columns below which a terminal gets no view.
const WIDTH_MIN: u16 = 20;

/// Rows below which a view says too little.
const HEIGHT_MIN: u16 = 4;

/// Rows above the view: terminals refuse to scroll one.
const ABOVE: u16 = 2;

/// The terminal for a view of so many rows, or of as many as it has room for, if standard output
/// and standard error are one that can show it. With `cleared`, what the screen shows scrolls away
/// first, also if there is no room for a view.
pub(super) fn open(height: u16, cleared: bool) -> Option<Terminal<AtBottom<CrosstermBackend<BufWriter<Stderr>>>>> {
    let is_capable = std::env::var_os("TERM").is_some_and(|term| !term.is_empty() && term != "dumb") || cfg!(windows);
    if !is_capable || !io::stdout().is_terminal() || !io::stderr().is_terminal() {
        return None;
    }
    let mut backend = AtBottom(CrosstermBackend::new(BufWriter::new(io::stderr())));
    let size = backend.size().ok()?;
    let height = height.min(size.height.saturating_sub(ABOVE));
    let has_room = size.width >= WIDTH_MIN && height >= HEIGHT_MIN;
    let bottom = backend.get_cursor_position().ok()?;
    if has_room || cleared {
        backend.set_cursor_position(bottom).ok()?;
    }
    if cleared {
        backend.append_lines(size.height).ok()?;
        backend.set_cursor_position(bottom).ok()?;
        Backend::flush(&mut backend).ok()?;
    }
    if !has_room {
        return None;
    }
    Terminal::with_options(backend, TerminalOptions { viewport: Viewport::Inline(height) }).ok()
}

/// A terminal whose view is at the bottom. It is never asked where its cursor is: the answer would
/// come between the keys that a program reads, and a process in the background may not ask.
pub(super) struct AtBottom<B>(pub(super) B);

impl<B: Backend> Backend for AtBottom<B> {
    type Error = B::Error;

    fn get_cursor_position(&mut self) -> Result<Position, B::Error> {
        Ok(Position::new(0, self.0.size()?.height.saturating_sub(1)))
    }

    fn draw<'a, I: Iterator<Item = (u16, u16, &'a Cell)>>(&mut self, content: I) -> Result<(), B::Error> {
        self.0.draw(content)
    }

    fn append_lines(&mut self, lines: u16) -> Result<(), B::Error> {
        self.0.append_lines(lines)
    }

    fn hide_cursor(&mut self) -> Result<(), B::Error> {
        self.0.hide_cursor()
    }

    fn show_cursor(&mut self) -> Result<(), B::Error> {
        self.0.show_cursor()
    }

    fn set_cursor_position<P: Into<Position>>(&mut self, position: P) -> Result<(), B::Error> {
        self.0.set_cursor_position(position)
    }

    fn clear(&mut self) -> Result<(), B::Error> {
        self.0.clear()
    }

    fn clear_region(&mut self, region: ClearType) -> Result<(), B::Error> {
        self.0.clear_region(region)
    }

    fn size(&self) -> Result<Size, B::Error> {
        self.0.size()
    }

    fn window_size(&mut self) -> Result<WindowSize, B::Error> {
        self.0.window_size()
    }

    fn flush(&mut self) -> Result<(), B::Error> {
        self.0.flush()
    }

    fn scroll_region_up(&mut self, region: std::ops::Range<u16>, lines: u16) -> Result<(), B::Error> {
        self.0.scroll_region_up(region, lines)
    }

    fn scroll_region_down(&mut self, region: std::ops::Range<u16>, lines: u16) -> Result<(), B::Error> {
        self.0.scroll_region_down(region, lines)
    }
}

/// A flag that is set whenever this process goes on after it was stopped.
pub(super) fn at_continuation() -> Arc<AtomicBool> {
    let continued = Arc::new(AtomicBool::new(false));
    #[cfg(unix)]
    {
        // Without it, the view is drawn over what the shell wrote meanwhile.
        let _ = signal_hook::flag::register(signal_hook::consts::SIGCONT, Arc::clone(&continued));
    }
    continued
}

/// Writes text above the view.
pub(super) fn insert<B: Backend>(terminal: &mut Terminal<B>, text: &str) {
    let width = usize::from(terminal.get_frame().area().width).max(1);
    for line in text.split('\n') {
        let line = one_line(&console::strip_ansi_codes(line).replace('\t', "    "), usize::MAX);
        let rows: Vec<Line<'_>> = rows(&line, width).into_iter().map(Line::from).collect();
        let height = u16::try_from(rows.len()).unwrap_or(u16::MAX);
        let _ = terminal.insert_before(height, |buffer| Paragraph::new(rows).render(buffer.area, buffer));
    }
}

/// The text in rows of at most so many columns; at least one row.
fn rows(text: &str, width: usize) -> Vec<String> {
    let (mut rows, mut column) = (vec![String::new()], 0);
    for char in text.chars() {
        let columns = Span::raw(char.to_string()).width();
        if column + columns > width && column > 0 {
            rows.push(String::new());
            column = 0;
        }
        rows.last_mut().into_iter().for_each(|row| row.push(char));
        column += columns;
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_no_wider_than_the_view() {
        assert_eq!(rows("abcdef", 3), ["abc", "def"]);
        assert_eq!(rows("", 3), [""]);
        assert_eq!(rows("漢字仮名", 5), ["漢字", "仮名"]);
        assert_eq!(rows("漢", 1), ["漢"]);
    }
}
