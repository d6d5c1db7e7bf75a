//! Sizes, and text for terminals.

use std::fmt;

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

/// A count with its noun.
pub fn plural(count: u64, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// The width of a text in a terminal: one column per character, which holds for all text of this
/// program.
pub fn columns(text: &str) -> usize {
    text.chars().count()
}

/// The text in lines of at most `width` characters, if no word is longer.
pub fn wrap(text: &str, width: usize) -> String {
    let mut lines = String::new();
    let mut column = 0;
    for word in text.split_whitespace() {
        let length = columns(word);
        if column > 0 && column + 1 + length > width {
            lines.push('\n');
            column = 0;
        } else if column > 0 {
            lines.push(' ');
            column += 1;
        }
        lines += word;
        column += length;
    }
    lines
}

/// Each line of a text in lines of at most `width` characters; those after its first are indented
/// by two more.
pub fn wrap_lines(text: &str, width: usize) -> String {
    let wrapped = text.lines().map(|line| {
        let indent = columns(line) - columns(line.trim_start());
        let (first, more) = (" ".repeat(indent), " ".repeat(indent + 2));
        first + &wrap(line, width.saturating_sub(indent + 2)).replace('\n', &format!("\n{more}"))
    });
    wrapped.collect::<Vec<_>>().join("\n")
}

/// The text in one line of at most `most` characters; the middle of a longer one is left out.
/// Characters that control the terminal or the direction of text are replaced, as they would act on
/// other text.
pub fn one_line(text: &str, most: usize) -> String {
    let turns =
        |char| matches!(char, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let shown = |char: char| if char.is_control() || turns(char) { '\u{fffd}' } else { char };
    let length = text.chars().count();
    if length <= most {
        return text.chars().map(shown).collect();
    }
    let (start, end) = (most / 2, most.saturating_sub(most / 2 + 1));
    let ends = text.chars().take(start).chain(['…']).chain(text.chars().skip(length - end));
    ends.map(shown).collect()
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
