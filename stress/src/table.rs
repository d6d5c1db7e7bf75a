//! Tables of results.
//!
//! A table is at most as wide as its terminal. Its first columns matter most: where the terminal is
//! too narrow for all of them, the last ones are left out, and a note below the table names them.
//! Without a terminal the width is that of the variable COLUMNS, or 100. A column in which every row
//! has 0 or nothing is left out, unless it is one of the first two. A column is text, which is at the
//! left and may be wrapped, if it is the first, or if one of its cells is no number.

use std::fmt;

use crate::text::{Bytes, columns, wrap, wrap_lines};

/// Rows under headings. The first column names the row.
#[derive(Debug, Clone)]
pub struct Table {
    headings: Vec<String>,
    /// Whether a column is text, which may be wrapped.
    texts: Vec<bool>,
    rows: Vec<Vec<String>>,
    /// The titles of groups of rows, each with the number of its rows; if there are none, all rows
    /// are one group without a title.
    groups: Vec<(String, usize)>,
}

/// A column: its heading, and the cell of a row.
pub type Column<R> = (&'static str, fn(&R) -> String);

/// A table whose first `texts` columns are text.
pub fn table<R>(rows: &[R], texts: usize, columns: &[Column<R>]) -> Table {
    let cells = |row: &R| columns.iter().map(|(heading, cell)| (*heading, cell(row))).collect();
    let mut table = Table::new(rows.iter().map(cells).collect());
    table.texts.iter_mut().take(texts).for_each(|is_text| *is_text = true);
    table
}

/// The cell of a missing value.
pub const NOTHING: &str = "-";

/// Whether a cell shows no value, or 0.
fn is_nothing(cell: &str) -> bool {
    let number = cell.split(' ').next().unwrap_or_default();
    number == NOTHING || number.chars().all(|digit| matches!(digit, '0' | '.'))
}

/// The cell of a value that may be missing.
pub fn optional(value: Option<impl ToString>) -> String {
    value.map_or_else(|| NOTHING.to_owned(), |value| value.to_string())
}

/// The cell of a number that may be missing.
pub fn number(number: Option<f64>, digits: usize) -> String {
    optional(number.map(|number| format!("{number:.digits$}")))
}

/// The cell of a size.
pub(crate) fn bytes(bytes: impl Into<Option<u64>>) -> String {
    optional(bytes.into().map(Bytes))
}

/// The cell of a ratio.
pub(crate) fn factor(factor: Option<f64>) -> String {
    number(factor, 3)
}

/// The cell of a number that is shown to one digit.
pub(crate) fn tenths(tenths: Option<f64>) -> String {
    number(tenths, 1)
}

/// The cell of a time in microseconds, as milliseconds.
pub(crate) fn ms(us: Option<f64>) -> String {
    tenths(us.map(|us| us / 1e3))
}

/// Whether a cell shows a number, with its unit if it has one, or nothing.
fn is_number(cell: &str) -> bool {
    cell.split(' ').count() <= 2 && cell.chars().next().is_none_or(|first| first == '-' || first.is_ascii_digit())
}

/// Blanks between columns.
const GAP: usize = 2;

/// Columns that are always shown.
const COLUMNS_LEAST: usize = 2;

/// The width that a longer text has at least where there is room for other columns.
const TEXT_LEAST: usize = 16;

impl Table {
    /// A table of rows with the same headings.
    pub fn new<H: AsRef<str>>(rows: Vec<Vec<(H, String)>>) -> Table {
        let (headings, texts, groups) = (Vec::new(), Vec::new(), Vec::new());
        let mut table = Table { headings, texts, rows: vec![Vec::new(); rows.len()], groups };
        for index in 0..rows.first().map_or(0, Vec::len) {
            let cells = || rows.iter().map(|row| &row[index].1);
            if index >= COLUMNS_LEAST && cells().all(|cell| is_nothing(cell)) {
                continue;
            }
            table.headings.push(rows[0][index].0.as_ref().to_owned());
            table.texts.push(index == 0 || !cells().all(|cell| is_number(cell)));
            table.rows.iter_mut().zip(cells()).for_each(|(row, cell)| row.push(cell.clone()));
        }
        table
    }

    /// The same, with its rows in groups: each row has a title, and so have the rows that follow it
    /// with the same one.
    #[must_use]
    pub fn grouped(mut self, titles: impl IntoIterator<Item = String>) -> Table {
        for title in titles {
            match self.groups.last_mut() {
                Some((last, rows)) if *last == title => *rows += 1,
                _ => self.groups.push((title, 1)),
            }
        }
        self
    }

    /// The table for a terminal of this width, or for none.
    pub(crate) fn render(&self, width: Option<usize>) -> String {
        let widths = self.widths(width);
        let mut rows = &self.rows[..];
        let one = [(String::new(), rows.len())];
        let groups = if self.groups.is_empty() { &one } else { &self.groups[..] };
        let mut blocks: Vec<String> = Vec::new();
        for (title, count) in groups {
            let (own, others) = rows.split_at((*count).min(rows.len()));
            rows = others;
            let title = if title.is_empty() { String::new() } else { format!("{title}\n") };
            blocks.push(title + &self.block(own, &widths));
        }
        let left_out = &self.headings[widths.len()..];
        if let (Some(width), false) = (width, left_out.is_empty()) {
            let note = format!("Not shown in {width} columns: {}. --json has all figures.", left_out.join("; "));
            blocks.push(wrap(&note, width));
        }
        blocks.join(if self.groups.is_empty() { "\n" } else { "\n\n" })
    }

    /// The widths of the columns that are shown: the first ones, as many as the terminal has room
    /// for if no word and no number is broken.
    fn widths(&self, width: Option<usize>) -> Vec<usize> {
        let all = 0..self.headings.len();
        let most: Vec<usize> = all.clone().map(|column| self.width(column, |text| vec![text])).collect();
        let Some(width) = width else { return most };
        let least = |column: usize| {
            let text = if self.texts[column] { most[column].min(TEXT_LEAST) } else { 0 };
            self.width(column, pieces).max(text)
        };
        let mut widths: Vec<usize> = all.map(least).collect();
        let needed = |widths: &[usize]| widths.iter().map(|width| width + GAP).sum::<usize>().saturating_sub(GAP);
        while widths.len() > COLUMNS_LEAST && needed(&widths) > width {
            widths.pop();
        }
        // What is left goes to texts first, the last one before the others, then to the headings
        // of most lines.
        for column in (0..widths.len()).rev().filter(|&column| self.texts[column]) {
            let spare = width.saturating_sub(needed(&widths));
            widths[column] += spare.min(most[column].saturating_sub(widths[column]));
        }
        let height = |column: usize, width| wrapped(&self.headings[column], width).len();
        while let Some(column) = (0..widths.len()).max_by_key(|&column| height(column, widths[column])) {
            let (now, spare) = (widths[column], width.saturating_sub(needed(&widths)));
            let is_flatter = |wider: &usize| height(column, *wider) < height(column, now);
            let Some(wider) = (now + 1..=now + spare).find(is_flatter) else { break };
            widths[column] = wider;
        }
        widths
    }

    /// The width at which no part of a text in this column is broken. Headings may be wrapped, and
    /// numbers may not.
    fn width<'a>(&'a self, column: usize, parts: impl Fn(&'a str) -> Vec<&'a str>) -> usize {
        let longest = |text| parts(text).into_iter().map(|part| columns(part.trim_end())).max().unwrap_or(0);
        let cell = |row: &'a Vec<String>| {
            let cell = &row[column];
            if self.texts[column] { longest(cell) } else { columns(cell) }
        };
        self.rows.iter().map(cell).chain([longest(&self.headings[column])]).max().unwrap_or(0)
    }

    /// Rows under the headings, between lines.
    fn block(&self, rows: &[Vec<String>], widths: &[usize]) -> String {
        let line = "─".repeat(widths.iter().sum::<usize>() + GAP * widths.len().saturating_sub(1));
        let mut lines = vec![self.row(&self.headings, widths), line.clone()];
        lines.extend(rows.iter().map(|row| self.row(row, widths)));
        lines.push(line);
        lines.join("\n")
    }

    /// The lines of a row: texts begin at the left of their columns, numbers end at the right.
    fn row(&self, row: &[String], widths: &[usize]) -> String {
        let cells: Vec<Vec<String>> = row.iter().zip(widths).map(|(cell, &width)| wrapped(cell, width)).collect();
        let height = cells.iter().map(Vec::len).max().unwrap_or(0);
        let line = |index: usize| {
            let shown = cells.iter().zip(widths).zip(&self.texts).map(|((cell, &width), is_text)| {
                let part = cell.get(index).map_or("", String::as_str);
                if *is_text { format!("{part:<width$}") } else { format!("{part:>width$}") }
            });
            shown.collect::<Vec<_>>().join(&" ".repeat(GAP)).trim_end().to_owned()
        };
        (0..height).map(line).collect::<Vec<_>>().join("\n")
    }
}

/// The parts of a text between which a line may end: words with the blank after them, and within
/// long words, such as options or paths, what ends with a comma or a slash.
fn pieces(text: &str) -> Vec<&str> {
    let mut pieces = Vec::new();
    for word in text.split_inclusive(' ') {
        match columns(word) > TEXT_LEAST {
            true => pieces.extend(word.split_inclusive([',', '/'])),
            false => pieces.push(word),
        }
    }
    pieces
}

/// A cell in lines of at most `width` characters, if none of its pieces is longer.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for piece in pieces(text) {
        match lines.last_mut() {
            Some(line) if line.is_empty() || columns(line) + columns(piece.trim_end()) <= width => *line += piece,
            _ => lines.push(piece.to_owned()),
        }
    }
    lines.iter().map(|line| line.trim_end().to_owned()).collect()
}

/// As wide as the terminal at standard output, if there is one.
impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            &self.render(Some(terminal_columns().unwrap_or_else(|| pipe_columns(std::env::var("COLUMNS").ok())))),
        )
    }
}

/// The width of tables where there is no terminal: that of `COLUMNS`, or else 100.
fn pipe_columns(columns: Option<String>) -> usize {
    columns.and_then(|columns| columns.parse().ok()).filter(|&columns| columns > 0).unwrap_or(100)
}

/// A text for standard output, in lines that fit into its terminal.
pub fn in_terminal(text: &str) -> String {
    wrap_lines(text, terminal_columns().unwrap_or(usize::MAX))
}

/// The width of the terminal at standard output, if known.
pub fn terminal_columns() -> Option<usize> {
    console::Term::stdout().size_checked().map(|(_, columns)| usize::from(columns)).filter(|&columns| columns > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Table {
        let rows = [("gpt2_fp32.trace.gz", ""), ("a/b/unet.trace", "backing:segments,cross_stream:off")];
        let columns: [Column<(&str, &str)>; 10] = [
            ("trace", |row| row.0.to_owned()),
            ("config", |row| row.1.to_owned()),
            ("requested", |_| "12.34 GiB".to_owned()),
            ("reserved", |_| "12.56 GiB".to_owned()),
            ("OOMs", |_| "0".to_owned()),
            ("driver calls", |_| "123456".to_owned()),
            ("worst µs", |_| number(Some(1234.5), 1)),
            ("missing", |_| NOTHING.to_owned()),
            ("large number", |_| "98765432101234".to_owned()),
            ("verdict", |_| "one large piece is left".to_owned()),
        ];
        table(&rows, 2, &columns)
    }

    fn widest(text: &str) -> usize {
        text.lines().map(columns).max().unwrap_or(0)
    }

    /// The headings are whole words in this order, and every cell that is shown is whole.
    #[test]
    fn nothing_is_broken_at_any_width() {
        let table = sample();
        for width in 20..=220 {
            let text = table.render(Some(width));
            assert!(widest(&text) <= width.max(37), "{width}:\n{text}");
            for word in ["gpt2_fp32.trace.gz", "a/b/unet.trace", "backing:segments,", "cross_stream:off"] {
                assert!(text.contains(word), "{word}:\n{text}");
            }
            let shown = table.headings.len() - text.matches(';').count() - usize::from(text.contains("Not shown"));
            for (heading, cell) in table.headings.iter().zip(&table.rows[0]).take(shown).skip(2) {
                let whole = if *heading == "verdict" { "piece" } else { cell };
                assert!(text.matches(whole).count() == 2, "{whole} at {width}:\n{text}");
            }
        }
    }

    #[test]
    fn the_last_columns_are_left_out_where_they_do_not_fit_and_named() {
        let rows = [["first", "1.00 MiB", "17"], ["second", "12.00 MiB", "18"]];
        let line = "─".repeat(25);
        let columns: [Column<[&str; 3]>; 3] = [
            ("what", |row| row[0].to_owned()),
            ("bytes", |row| row[1].to_owned()),
            ("driver calls", |row| row[2].to_owned()),
        ];
        let few = table(&rows, 1, &columns);
        assert_eq!(
            few.render(Some(30)),
            format!(
                "what        bytes  driver\n                    calls\n{line}\n\
                 first    1.00 MiB      17\nsecond  12.00 MiB      18\n{line}"
            )
        );
        let narrow = few.render(Some(20));
        assert!(narrow.ends_with("Not shown in 20\ncolumns: driver\ncalls. --json has\nall figures."), "{narrow}");
        assert!(!narrow.contains("17"), "{narrow}");
        assert_eq!(few.render(None), few.render(Some(200)));
    }

    #[test]
    fn tables_in_a_pipe_have_the_width_of_the_variable() {
        let width = |columns: &str| pipe_columns(Some(columns.to_owned()));
        assert_eq!((width("60"), width(""), width("0"), width("x"), pipe_columns(None)), (60, 100, 100, 100, 100));
    }

    #[test]
    fn long_words_end_a_line_after_a_comma_or_a_slash() {
        let cell = "fsdp (traces/of/rank_10.pickle.gz)";
        assert_eq!(wrapped(cell, 18), ["fsdp (traces/of/", "rank_10.pickle.gz)"]);
        assert_eq!(wrapped("backing:segments,history:1", 18), ["backing:segments,", "history:1"]);
        assert_eq!(wrapped("first ns/op", 8), ["first", "ns/op"]);
    }

    #[test]
    fn a_column_of_zeros_or_of_nothing_is_left_out() {
        for (cells, is_shown) in [(["0", "0"], false), (["0.00", NOTHING], false), (["0 bytes", ""], false)]
            .into_iter()
            .chain([(["0", "1"], true), (["0.01", NOTHING], true), (["a", ""], true), (["-0.5", "0"], true)])
        {
            let columns: [Column<&str>; 3] =
                [("name", |_| "x".to_owned()), ("zero", |_| "0".to_owned()), ("figure", |cell| (*cell).to_owned())];
            let text = table(&cells, 1, &columns).render(None);
            assert!(text.contains("zero") && text.contains("figure") == is_shown, "{cells:?}: {text}");
        }
    }

    #[test]
    fn groups_of_rows_have_titles_and_the_same_columns() {
        let rows = [("a", "1"), ("a", "22"), ("b", "333")];
        let columns: [Column<(&str, &str)>; 2] = [("name", |_| "x".to_owned()), ("figure", |row| row.1.to_owned())];
        let text = table(&rows, 1, &columns).grouped(rows.iter().map(|row| format!("program {}", row.0))).render(None);
        let (line, head) = ("────────────", "name  figure");
        assert_eq!(
            text,
            format!(
                "program a\n{head}\n{line}\nx          1\nx         22\n{line}\n\nprogram b\n{head}\n{line}\nx        333\n{line}"
            )
        );
    }

    #[test]
    fn without_a_terminal_a_row_is_a_line() {
        let text = sample().render(None);
        assert_eq!(text.lines().count(), 1 + 1 + 2 + 1);
    }
}
