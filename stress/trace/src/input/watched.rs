//! JSON on its way to the parser, which holds one text at a time and a byte for each level of what
//! it skips.

use std::io::{self, Read};

use super::error::Reason;

/// The longest text or number in bytes; far beyond those of snapshots.
const LONGEST: usize = 16 << 20;
/// The most levels of nested lists and dictionaries.
const DEEPEST: usize = 1000;

/// Passes JSON on up to where it breaks a limit.
#[derive(Debug)]
pub(super) struct Watched<R> {
    inner: R,
    quoted: bool,
    escaped: bool,
    /// Bytes of the present text or number so far.
    run: usize,
    depth: usize,
}

impl<R: Read> Watched<R> {
    pub(super) fn new(inner: R) -> Self {
        Self { inner, quoted: false, escaped: false, run: 0, depth: 0 }
    }

    /// Counts a byte, which need not be valid JSON.
    fn count(&mut self, byte: u8) -> Result<(), Reason> {
        self.run += 1;
        match byte {
            _ if self.escaped => self.escaped = false,
            b'\\' if self.quoted => self.escaped = true,
            b'"' => (self.quoted, self.run) = (!self.quoted, 0),
            _ if self.quoted => {}
            b'{' | b'[' => (self.depth, self.run) = (self.depth + 1, 0),
            b'}' | b']' => (self.depth, self.run) = (self.depth.saturating_sub(1), 0),
            b',' | b':' | b' ' | b'\t' | b'\n' | b'\r' => self.run = 0,
            _ => {}
        }
        match () {
            () if self.run > LONGEST => Err(Reason::Structure("a text or number in it is longer than 16 MiB")),
            () if self.depth > DEEPEST => Err(Reason::Structure("it is nested more than 1000 levels deep")),
            () => Ok(()),
        }
    }
}

impl<R: Read> Read for Watched<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(into)?;
        into[..count].iter().try_for_each(|&byte| self.count(byte))?;
        Ok(count)
    }
}
