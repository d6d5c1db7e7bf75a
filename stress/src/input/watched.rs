//! JSON on its way to the parser, which holds one text at a time and a byte for each level of what it skips, however many there are.

use std::cell::{Cell, RefCell};
use std::io::{self, Read};

use super::allowance;
use super::error::{Fault, Location, Reason};
use super::gzip::Stored;

/// The longest text or number in bytes; far beyond what any snapshot has.
const LONGEST: usize = 16 << 20;
/// The most levels that lists and dictionaries are nested in each other.
const DEEPEST: usize = 1000;

const TOO_LONG: Reason = Reason::Structure("a text or number in it is longer than 16 MiB");
const TOO_DEEP: Reason = Reason::Structure("it is nested more than 1000 levels deep");

/// How much was read and what it takes. Also keeps what was found wrong, which the parser has no error for.
#[derive(Debug)]
pub(super) struct Limits<'a> {
    stored: &'a Stored,
    content: Cell<u64>,
    taken: Cell<usize>,
    found: RefCell<Option<Fault>>,
}

impl<'a> Limits<'a> {
    pub(super) fn new(stored: &'a Stored) -> Self {
        Self { stored, content: Cell::new(0), taken: Cell::new(0), found: RefCell::new(None) }
    }

    /// Makes room for another item. `false` if that is too much, or the host has none.
    pub(super) fn make_room<T>(&self, items: &mut Vec<T>) -> bool {
        let before = items.capacity();
        if let Err(error) = items.try_reserve(1) {
            return self.refuse(error.into());
        }
        self.taken.set(self.taken.get() + (items.capacity() - before) * size_of::<T>());
        match allowance::check(self.taken.get(), self.content.get(), self.stored) {
            Ok(()) => true,
            Err(reason) => self.refuse(reason),
        }
    }

    /// Keeps what is wrong about here; the first counts.
    pub(super) fn refuse(&self, reason: Reason) -> bool {
        self.found.borrow_mut().get_or_insert(self.here(reason));
        false
    }

    fn here(&self, reason: Reason) -> Fault {
        Fault::new(Location::Byte(self.content.get()), reason)
    }

    /// What was found wrong.
    pub(super) fn found(&self) -> Option<Fault> {
        self.found.take()
    }
}

/// Hands JSON on up to where it breaks a limit.
#[derive(Debug)]
pub(super) struct Watched<'l, R> {
    inner: R,
    limits: &'l Limits<'l>,
    quoted: bool,
    escaped: bool,
    /// Bytes of the present text or number so far.
    run: usize,
    depth: usize,
    /// What is wrong with what follows. It is told when the parser asks for that: it may find a fault of its own before.
    next: Option<Fault>,
}

impl<'l, R: Read> Watched<'l, R> {
    pub(super) fn new(inner: R, limits: &'l Limits<'l>) -> Self {
        Self { inner, limits, quoted: false, escaped: false, run: 0, depth: 0, next: None }
    }

    /// Goes past a byte, which is not checked to be JSON.
    fn pass(&mut self, byte: u8) -> Result<(), Reason> {
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
            () if self.run > LONGEST => Err(TOO_LONG),
            () if self.depth > DEEPEST => Err(TOO_DEEP),
            () => Ok(()),
        }
    }
}

impl<R: Read> Read for Watched<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if let Some(fault) = self.next.take() {
            self.limits.found.replace(Some(fault));
            return Err(io::Error::other("a limit was exceeded"));
        }
        let count = self.inner.read(into)?;
        for (index, &byte) in into[..count].iter().enumerate() {
            if let Err(reason) = self.pass(byte) {
                self.next = Some(self.limits.here(reason));
                return if index > 0 { Ok(index) } else { self.read(into) };
            }
            self.limits.content.set(self.limits.content.get() + 1);
        }
        Ok(count)
    }
}
