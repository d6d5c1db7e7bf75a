//! Text for people.

/// Columns that the text takes in a terminal: one a character, which holds for all that is printed here but what users
/// bring in.
pub fn columns(text: &str) -> usize {
    text.chars().count()
}

/// The text in lines of at most `width` characters, where words allow.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_wrapped_between_words() {
        assert_eq!(wrap("one two  three", 7), "one two\nthree");
        assert_eq!(wrap("incomprehensible", 7), "incomprehensible");
        assert_eq!(wrap("", 7), "");
    }
}
