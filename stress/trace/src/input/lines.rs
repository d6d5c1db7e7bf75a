//! Lines of text, of bounded length. They end with LF or CR LF.

use std::io::{BufRead, Read};

use super::error::{Fault, LINE_MAX, Location, Reason};

/// Returns one line at a time.
pub(super) struct Lines<R> {
    content: R,
    line: Vec<u8>,
    number: u64,
}

impl<R: BufRead> Lines<R> {
    pub(super) fn new(content: R) -> Self {
        Self { content, line: Vec::new(), number: 0 }
    }

    /// The next line that is not empty, without its end, or `None` after the last.
    pub(super) fn next(&mut self) -> Result<Option<&str>, Fault> {
        loop {
            self.line.clear();
            self.number += 1;
            let location = self.location();
            let fault = |reason| Fault::new(location, reason);
            let read = self.content.by_ref().take(LINE_MAX as u64 + 2).read_until(b'\n', &mut self.line);
            if read.map_err(|error| fault(Reason::from_read(error)))? == 0 {
                return Ok(None);
            }
            let line = self.line.strip_suffix(b"\n").unwrap_or(&self.line);
            let length = line.strip_suffix(b"\r").unwrap_or(line).len();
            if length > LINE_MAX {
                return Err(fault(Reason::LineTooLong));
            }
            if length > 0 {
                return str::from_utf8(&self.line[..length]).map(Some).map_err(|_| fault(Reason::NotUtf8));
            }
        }
    }

    /// Whether the last returned line has an end. The last line of a program that was killed may
    /// have none.
    pub(super) fn ended(&self) -> bool {
        self.line.ends_with(b"\n")
    }

    /// The location of the last returned line.
    pub(super) fn location(&self) -> Location {
        Location::Line(self.number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_at_line_ends() {
        for text in ["one\r\n\ntwo", "one\n\r\ntwo\r\n", "one\n\ntwo\n"] {
            for capacity in 1..8 {
                let mut lines = Lines::new(std::io::BufReader::with_capacity(capacity, text.as_bytes()));
                assert_eq!(lines.next().unwrap(), Some("one"), "{text:?}");
                assert_eq!(lines.next().unwrap(), Some("two"), "{text:?}");
                assert_eq!(lines.location(), Location::Line(3), "{text:?}");
                assert_eq!(lines.next().unwrap(), None, "{text:?}");
                assert_eq!(lines.next().unwrap(), None, "{text:?}");
            }
        }
    }

    #[test]
    fn bounds_the_length() {
        let long = vec![b'a'; LINE_MAX + 1];
        assert!(Lines::new(&long[1..]).next().is_ok());
        let small_reads = std::io::BufReader::with_capacity(100, &long[..]);
        assert!(Lines::new(small_reads).next().is_err());
    }
}
