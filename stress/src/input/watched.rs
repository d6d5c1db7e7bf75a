//! JSON on its way to the parser, which holds one text at a time and a byte for each level of what
//! it skips, however many there are.

use std::cell::{Cell, RefCell};
use std::io::{self, BufRead, Read};

use super::error::{Fault, Location, Reason};

/// The longest text or number in bytes; far beyond what any snapshot has.
const LONGEST: usize = 16 << 20;
/// The most levels that lists and dictionaries are nested in each other.
const DEEPEST: usize = 1000;

const TOO_LONG: Reason = Reason::Structure("a text or number in it is longer than 16 MiB");
const TOO_DEEP: Reason = Reason::Structure("it is nested more than 1000 levels deep");

/// Keeps what was found wrong, which the parser has no error for.
#[derive(Debug, Default)]
pub(super) struct Limits {
    content: Cell<u64>,
    found: RefCell<Option<Fault>>,
}

impl Limits {
    /// Keeps what is wrong about here; the first counts.
    pub(super) fn refuse(&self, reason: Reason) {
        self.found.borrow_mut().get_or_insert(self.here(reason));
    }

    fn here(&self, reason: Reason) -> Fault {
        Fault::new(Location::Byte(self.content.get()), reason)
    }

    /// What was found wrong.
    pub(super) fn found(&self) -> Option<Fault> {
        self.found.take()
    }
}

/// What Python writes for numbers that JSON has none for.
const NO_NUMBERS: [&[u8]; 2] = [b"NaN", b"Infinity"];
/// A number that is no integer.
const STAND_IN: &[u8] = b"9e307";

/// Hands JSON on up to where it breaks a limit.
#[derive(Debug)]
pub(super) struct Watched<'l, R> {
    inner: R,
    limits: &'l Limits,
    quoted: bool,
    escaped: bool,
    /// Bytes of the present text or number so far.
    run: usize,
    depth: usize,
    /// What is left of `NaN` or `Infinity`.
    rest: &'static [u8],
    /// What is to be handed on first.
    pending: &'static [u8],
    /// What is wrong with what follows. It is told when the parser asks for that: it may find a
    /// fault of its own before.
    next: Option<Fault>,
}

impl<'l, R: BufRead> Watched<'l, R> {
    pub(super) fn new(inner: R, limits: &'l Limits) -> Self {
        let (rest, pending) = (&[][..], &[][..]);
        Self { inner, limits, quoted: false, escaped: false, run: 0, depth: 0, rest, pending, next: None }
    }

    /// Goes past a byte, which is not checked to be JSON. Gives what to hand on.
    fn pass(&mut self, byte: u8) -> Result<Option<u8>, Reason> {
        if let Some((&expected, rest)) = self.rest.split_first() {
            self.rest = rest;
            // A byte that no JSON has.
            return Ok((byte != expected).then_some(b'!'));
        }
        self.run += 1;
        match byte {
            _ if self.escaped => self.escaped = false,
            b'\\' if self.quoted => self.escaped = true,
            b'"' => (self.quoted, self.run) = (!self.quoted, 0),
            _ if self.quoted => {}
            b'{' | b'[' => (self.depth, self.run) = (self.depth + 1, 0),
            b'}' | b']' => (self.depth, self.run) = (self.depth.saturating_sub(1), 0),
            b',' | b':' | b' ' | b'\t' | b'\n' | b'\r' => self.run = 0,
            _ => {
                if let Some(no_number) = NO_NUMBERS.iter().find(|no_number| no_number[0] == byte) {
                    (self.rest, self.pending) = (&no_number[1..], &STAND_IN[1..]);
                    return Ok(Some(STAND_IN[0]));
                }
            }
        }
        match () {
            () if self.run > LONGEST => Err(TOO_LONG),
            () if self.depth > DEEPEST => Err(TOO_DEEP),
            () => Ok(Some(byte)),
        }
    }
}

impl<R: BufRead> Read for Watched<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let mut count = 0;
        while count < into.len() {
            if let Some((&byte, pending)) = self.pending.split_first() {
                (into[count], self.pending) = (byte, pending);
                count += 1;
                continue;
            }
            if let Some(fault) = self.next.take() {
                if count > 0 {
                    self.next = Some(fault);
                    break;
                }
                self.limits.found.replace(Some(fault));
                return Err(io::Error::other("a limit was exceeded"));
            }
            let buffer = match self.inner.fill_buf() {
                Ok(buffer) => buffer,
                Err(_) if count > 0 => break,
                Err(error) => return Err(error),
            };
            let Some(&byte) = buffer.first() else {
                if count == 0 && !self.rest.is_empty() {
                    self.rest = &[];
                    into[0] = b'!';
                    return Ok(1);
                }
                break;
            };
            match self.pass(byte) {
                Ok(passed) => {
                    self.inner.consume(1);
                    self.limits.content.set(self.limits.content.get() + 1);
                    if let Some(byte) = passed {
                        into[count] = byte;
                        count += 1;
                    }
                }
                Err(reason) => self.next = Some(self.limits.here(reason)),
            }
        }
        Ok(count)
    }
}
