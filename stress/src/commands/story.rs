//! Text in paragraphs under headings, with maps.

use aquifer_trace::Map;

use crate::commands::study::rows::Answer;
use crate::exit::Failure;
use crate::map::Style;
use crate::session::Session;
use crate::text::{rewrap, wrap};

/// Writes the text of a command, unless its results are to be JSON.
pub(super) struct Story<'a> {
    pub(super) session: &'a Session,
    style: Style,
}

impl Story<'_> {
    pub(super) fn new(session: &Session, ascii: bool) -> Story<'_> {
        Story { session, style: Style::of_stdout(ascii) }
    }

    pub(super) fn say(&self, text: &str) -> Result<(), Failure> {
        self.session.show(format_args!("{}\n", wrap(text, self.style.width)))
    }

    /// Questions, with their answers behind them.
    pub(super) fn answers(&self, answers: &[Answer]) -> Result<(), Failure> {
        let lines = answers.iter().map(|Answer { question, answer }| format!("{question:<19}{answer}"));
        let lines = lines.collect::<Vec<_>>().join("\n");
        self.session.show(format_args!("{}\n", rewrap(&lines, usize::MAX, self.style.width)))
    }

    pub(super) fn heading(&self, text: &str) -> Result<(), Failure> {
        let line = if self.style.ascii { "-" } else { "─" };
        self.session.show(format_args!("{text}\n{}", line.repeat(text.chars().count())))
    }

    pub(super) fn map(&self, map: &Map) -> Result<(), Failure> {
        self.session.show(format_args!("{}\n", self.style.draw(map)))
    }
}
