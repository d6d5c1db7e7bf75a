//! Tables of results.
//!
//! A table is at most as wide as its terminal. If words or numbers would have to be broken for
//! that, its rows are stacked instead: each is a block of its name and its cells with their
//! headings. Without a terminal the width is unlimited.

use std::fmt;

use comfy_table::{Cell, CellAlignment, ColumnConstraint, ContentArrangement, Width, presets};

use crate::text::{columns, wrap};

/// Rows under headings. The first column names the row.
#[derive(Debug, Clone)]
pub struct Table {
    headings: Vec<String>,
    /// Whether a column is text, which may be wrapped between words.
    texts: Vec<bool>,
    rows: Vec<Vec<String>>,
}

/// A column: its heading, and the cell of a row.
pub type Column<R> = (&'static str, fn(&R) -> String);

/// A table whose first `texts` columns are text and whose others are numbers.
pub fn table<R>(rows: &[R], texts: usize, columns: &[Column<R>]) -> Table {
    Table {
        headings: columns.iter().map(|(heading, _)| (*heading).to_owned()).collect(),
        texts: (0..columns.len()).map(|column| column < texts).collect(),
        rows: rows.iter().map(|row| columns.iter().map(|(_, cell)| cell(row)).collect()).collect(),
    }
}

/// The cell of a missing value.
pub const NOTHING: &str = "-";

/// The cell of a value that may be missing.
pub fn optional(value: Option<impl ToString>) -> String {
    value.map_or_else(|| NOTHING.to_owned(), |value| value.to_string())
}

/// The cell of a number that may be missing.
pub fn number(number: Option<f64>, digits: usize) -> String {
    optional(number.map(|number| format!("{number:.digits$}")))
}

/// Blanks around a cell.
const PADDING: usize = 2;

/// Width of a column besides its cells. The frame takes one more at the end.
const FRAME: usize = PADDING + 1;

/// Indentation of the lines of a stacked row.
const INDENT: &str = "  ";

impl Table {
    /// The same, with text in the last column.
    #[must_use]
    pub fn ending_in_text(mut self) -> Table {
        if let Some(last) = self.texts.last_mut() {
            *last = true;
        }
        self
    }

    /// The table for a terminal of this width, or for none.
    fn render(&self, width: Option<usize>) -> String {
        let least: Vec<usize> = (0..self.headings.len()).map(|column| self.least(column)).collect();
        let needed = least.iter().map(|columns| columns + FRAME).sum::<usize>() + 1;
        match width {
            Some(width) if width < needed => self.stacked(width),
            _ => self.framed(width, &least),
        }
    }

    /// The width at which no word and no number of this column is broken. Headings may be wrapped.
    fn least(&self, column: usize) -> usize {
        let longest_word = |text: &str| text.split_whitespace().map(columns).max().unwrap_or(0);
        let cells = self.rows.iter().filter_map(|row| row.get(column));
        let whole = |cell: &String| if self.texts[column] { longest_word(cell) } else { columns(cell) };
        cells.map(whole).chain([longest_word(&self.headings[column])]).max().unwrap_or(0)
    }

    fn framed(&self, width: Option<usize>, least: &[usize]) -> String {
        let mut table = comfy_table::Table::new();
        table
            .load_style(presets::UTF8_FULL_CONDENSED)
            .set_content_arrangement(ContentArrangement::Dynamic)
            .force_no_tty();
        if let Some(width) = width {
            table.set_width(u16::try_from(width).unwrap_or(u16::MAX));
        }
        table.set_header(self.headings.iter().map(Cell::new));
        for row in &self.rows {
            table.add_row(row);
        }
        for ((column, least), is_text) in table.column_iter_mut().zip(least).zip(&self.texts) {
            let least = u16::try_from(least + PADDING).unwrap_or(u16::MAX);
            column.set_constraint(ColumnConstraint::LowerBoundary(Width::Fixed(least)));
            if !is_text {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        table.to_string()
    }

    fn stacked(&self, width: usize) -> String {
        self.rows.iter().map(|row| self.block(row, width)).collect::<Vec<_>>().join("\n")
    }

    /// A row's name, and below it `heading value` for each cell that is not empty.
    fn block(&self, row: &[String], width: usize) -> String {
        let room = width.saturating_sub(INDENT.len());
        let shown = self.headings.iter().zip(row).skip(1).filter(|(_, cell)| !cell.is_empty());
        let mut pairs: Vec<String> = shown.map(|(heading, cell)| format!("{heading} {cell},")).collect();
        if let Some(last) = pairs.last_mut() {
            last.pop();
        }
        let mut lines: Vec<String> = Vec::new();
        for pair in pairs {
            match lines.last_mut() {
                Some(line) if columns(line) + 1 + columns(&pair) <= room => *line += &format!(" {pair}"),
                _ => lines.push(pair),
            }
        }
        let mut block = row.first().cloned().unwrap_or_default();
        // Only a pair that is wider than the terminal is broken here, between its words.
        for line in lines.iter().flat_map(|line| wrap(line, room).lines().map(str::to_owned).collect::<Vec<_>>()) {
            block += &format!("\n{INDENT}{line}");
        }
        block
    }
}

/// As wide as the terminal at standard output, if there is one.
impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(terminal_columns()))
    }
}

/// The width of the terminal at standard output, if known.
pub fn terminal_columns() -> Option<usize> {
    comfy_table::Table::new().width().map(usize::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Table {
        let rows = [("gpt2_fp32.trace.gz", ""), ("a/b/unet.trace", "backing:segments,cross_stream:off")];
        let columns: [Column<(&str, &str)>; 8] = [
            ("trace", |row| row.0.to_owned()),
            ("config", |row| row.1.to_owned()),
            ("requested", |_| "12.34 GiB".to_owned()),
            ("reserved", |_| "12.56 GiB".to_owned()),
            ("driver calls", |_| "123456".to_owned()),
            ("worst µs", |_| number(Some(1234.5), 1)),
            ("large number", |_| "12345678901234".to_owned()),
            ("verdict", |_| "one large piece is left".to_owned()),
        ];
        table(&rows, 2, &columns).ending_in_text()
    }

    /// Checks that words and numbers are not broken.
    fn is_whole(text: &str) {
        for word in ["gpt2_fp32.trace.gz", "a/b/unet.trace", "backing:segments,cross_stream:off", "123456", "1234.5"] {
            assert!(text.contains(word), "{word}:\n{text}");
        }
        for number in ["12.34 GiB", "12.56 GiB", "12345678901234"] {
            assert_eq!(text.matches(number).count(), 2, "{number}:\n{text}");
        }
        for word in ["requested", "reserved", "driver", "calls", "large", "number", "verdict", "piece"] {
            assert!(text.contains(word), "{word}:\n{text}");
        }
    }

    fn widest(text: &str) -> usize {
        text.lines().map(columns).max().unwrap_or(0)
    }

    #[test]
    fn nothing_is_broken_at_any_width() {
        let table = sample();
        for width in 35..=220 {
            let text = table.render(Some(width));
            is_whole(&text);
            assert!(widest(&text) <= width.max(42), "{width}:\n{text}");
        }
    }

    #[test]
    fn rows_are_stacked_where_they_do_not_fit() {
        let rows = [["first", "1.00 MiB", "", "17"], ["second", "12.00 MiB", NOTHING, "18"]];
        let columns: [Column<[&str; 4]>; 4] = [
            ("what", |row| row[0].to_owned()),
            ("bytes", |row| row[1].to_owned()),
            ("missing", |row| row[2].to_owned()),
            ("driver calls", |row| row[3].to_owned()),
        ];
        let few = table(&rows, 1, &columns);
        assert_eq!(
            few.render(Some(30)),
            "first\n  bytes 1.00 MiB,\n  driver calls 17\nsecond\n  bytes 12.00 MiB, missing -,\n  driver calls 18"
        );
        assert!(few.render(Some(48)).starts_with('┌'), "headings are wrapped");
        assert_eq!(few.render(None), few.render(Some(200)));
        for word in few.render(Some(9)).split_whitespace() {
            assert!(few.render(None).contains(word.trim_end_matches(',')), "{word}");
        }
    }

    #[test]
    fn without_a_terminal_a_row_is_a_line() {
        let text = sample().render(None);
        is_whole(&text);
        assert_eq!(text.lines().count(), 3 + 2 + 1);
    }
}
