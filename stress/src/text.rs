//! Sizes, and text for terminals.

use std::fmt;

pub use aquifer_trace::text::{one_line, plural};

/// A number of bytes as in the allocator's messages, and large ones in TiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    #[expect(clippy::cast_precision_loss, reason = "two decimals are shown")]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 >> 30 {
            0..1024 => aquifer_allocator::Bytes(self.0).fmt(f),
            _ => f.pad(&format!("{:.2} TiB", self.0 as f64 / (1_u64 << 40) as f64)),
        }
    }
}

/// The width of a text in a terminal: one column per character, which holds for all text of this
/// program.
pub fn columns(text: &str) -> usize {
    text.chars().count()
}

/// The text in lines of at most `width` characters, if no word is longer.
pub fn wrap(text: &str, width: usize) -> String {
    fill("", 0, text, width)
}

/// Each line of a text in lines of at most `width` characters; those after its first are indented
/// by two more.
pub fn wrap_lines(text: &str, width: usize) -> String {
    let wrapped = text.lines().map(|line| {
        let indent = indentation(line);
        fill(&line[..indent], indent + 2, &line[indent..], width)
    });
    wrapped.collect::<Vec<_>>().join("\n")
}

/// The words of a text, after `start` and with so many blanks before each later line.
fn fill(start: &str, blanks: usize, text: &str, width: usize) -> String {
    let (mut lines, mut line, mut is_first) = (String::new(), start.to_owned(), true);
    for word in text.split_whitespace() {
        if !is_first && columns(&line) + 1 + columns(word) > width {
            lines += &line;
            lines.push('\n');
            line = " ".repeat(blanks);
        } else if !is_first {
            line.push(' ');
        }
        line += word;
        is_first = false;
    }
    lines + line.trim_end()
}

/// A text that was wrapped at `from` columns, wrapped at `to`. A line that begins with a word and at
/// least two blanks is an entry of a list, whose description begins behind them.
pub fn rewrap(text: &str, from: usize, to: usize) -> String {
    let mut wrapped: Vec<String> = Vec::new();
    let mut lines = text.lines().peekable();
    while let Some(first) = lines.next() {
        let indent = indentation(first);
        let key = first[indent..].find("  ").map_or(indent, |end| indent + end + indentation(&first[indent + end..]));
        // Lines after a full one continue it, at the same place.
        let (mut item, mut last, mut rest) = (first[key..].to_owned(), first, None);
        while let Some(next) = lines.next_if(|next| {
            let (word, place) = (next.split_whitespace().next().unwrap_or_default(), indentation(next));
            let is_in_place = rest.map_or(place == key || (key == indent && place == indent + 2), |rest| rest == place);
            let begins = word.is_empty() || word == "-" || last.ends_with(':');
            is_in_place && !begins && columns(last) + 1 + columns(word) > from
        }) {
            rest = Some(indentation(next));
            item = item + " " + next.trim();
            last = next;
        }
        let rest = rest.unwrap_or(if key == indent && (1..=4).contains(&indent) { indent + 2 } else { key });
        wrapped.push(fill(&first[..key], rest.min(to / 2), &item, to));
    }
    wrapped.join("\n")
}

/// The blanks at the start of a line.
fn indentation(line: &str) -> usize {
    line.len() - line.trim_start_matches(' ').len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        for (bytes, text) in [(0, "0 bytes"), (1, "1 byte"), (1 << 30, "1.00 GiB"), (3 << 39, "1.50 TiB")] {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
        assert_eq!(format!("{:>9}", Bytes((1 << 40) - 1)), "1024.00 GiB");
        assert_eq!(format!("{:>9}", Bytes(1 << 40)), " 1.00 TiB");
    }

    #[test]
    fn text_is_wrapped_between_words() {
        assert_eq!(wrap("one two  three", 7), "one two\nthree");
        assert_eq!(wrap("incomprehensible", 7), "incomprehensible");
        assert_eq!(wrap("", 7), "");
    }

    #[test]
    fn wrapped_lists_and_paragraphs_are_wrapped_at_another_width() {
        let text = "\
One paragraph of a few
words:
  key     what it is for
          in two lines
  a_longer_key_than_any
          its own line
  - a point with several
    words
  - another
    code()
A last line";
        assert_eq!(rewrap(text, 24, 24), text);
        let narrow = "\
One paragraph of a
few words:
  key     what it is
          for in two
          lines
  a_longer_key_than_any
          its own
          line
  - a point with
    several words
  - another
    code()
A last line";
        assert_eq!(rewrap(text, 24, 20), narrow);
    }

    #[test]
    fn lines_keep_their_indentation() {
        assert_eq!(wrap_lines("one two three\n  four five", 9), "one two\n  three\n  four\n    five");
        assert_eq!(wrap_lines("one  two\n\n", usize::MAX), "one two\n");
    }

    #[test]
    fn a_line_is_short_and_has_no_control_characters() {
        assert_eq!(
            one_line("a\x1b[1m\x07b\u{202e}c\u{2066}d\u{200f}e\nf", 100),
            "a\u{fffd}[1m\u{fffd}b\u{fffd}c\u{fffd}d\u{fffd}e\u{fffd}f"
        );
        assert_eq!(one_line("größe 模型 שם", 100), "größe 模型 שם");
        assert_eq!(one_line("0123456789", 10), "0123456789");
        assert_eq!(one_line("0123456789abc", 10), "01234…9abc");
        assert_eq!(one_line("äöü€", 3), "ä…€");
    }
}
