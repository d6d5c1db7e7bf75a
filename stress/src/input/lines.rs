//! Lines of text, of bounded length. They end with LF, CR LF or CR.

use std::io::BufRead;

use super::error::{Fault, LINE_MAX, Location, Reason};

/// Hands out one line at a time.
pub(super) struct Lines<R> {
    content: R,
    line: Vec<u8>,
    number: u64,
    /// The last line ended with CR, of which an LF may be a part.
    after_cr: bool,
    /// The last line ended with LF or CR, not with the content.
    ended: bool,
}

impl<R: BufRead> Lines<R> {
    pub(super) fn new(content: R) -> Self {
        Self { content, line: Vec::new(), number: 0, after_cr: false, ended: true }
    }

    /// The next line that is not empty, without its end, or `None` after the last.
    pub(super) fn next(&mut self) -> Result<Option<&str>, Fault> {
        self.line.clear();
        loop {
            self.number += 1;
            if !self.fill()? {
                return Ok(None);
            }
            if !self.line.is_empty() {
                let location = self.location();
                return str::from_utf8(&self.line).map(Some).map_err(|_| Fault::new(location, Reason::NotUtf8));
            }
        }
    }

    /// Reads the next line. `false` after the last.
    fn fill(&mut self) -> Result<bool, Fault> {
        let location = Location::Line(self.number);
        let fault = |reason| Fault::new(location, reason);
        loop {
            let available = match self.content.fill_buf() {
                Ok(available) => available,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(fault(Reason::from_read(error))),
            };
            if std::mem::take(&mut self.after_cr) && available.first() == Some(&b'\n') {
                self.content.consume(1);
                continue;
            }
            let end = available.iter().position(|&byte| matches!(byte, b'\n' | b'\r'));
            self.after_cr = end.is_some_and(|end| available[end] == b'\r');
            let part = &available[..end.unwrap_or(available.len())];
            if self.line.len() + part.len() > LINE_MAX {
                return Err(fault(Reason::LineTooLong));
            }
            self.line.extend_from_slice(part);
            let (used, finished) = (part.len() + usize::from(end.is_some()), available.is_empty());
            self.content.consume(used);
            if finished || end.is_some() {
                self.ended = end.is_some();
                return Ok(self.ended || !self.line.is_empty());
            }
        }
    }

    /// Whether the line handed out last has an end. The last line of a program that was killed may
    /// have none.
    pub(super) fn ended(&self) -> bool {
        self.ended
    }

    /// The place of the line handed out last.
    pub(super) fn location(&self) -> Location {
        Location::Line(self.number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_at_line_ends() {
        for text in ["one\r\n\ntwo", "one\r\rtwo", "one\n\r\ntwo\r\n", "one\n\ntwo\n", "one\r\rtwo\r"] {
            // Also where a buffer ends between CR and LF.
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
