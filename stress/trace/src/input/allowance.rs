//! Limits the memory and work for an input by the number of bytes read.

use std::cell::Cell;
use std::io::{self, Read};
use std::rc::Rc;

use super::error::Reason;

/// Memory for any input.
const FOR_ANY: usize = 32 << 20;
/// Memory for each byte of the content. A snapshot takes 3 to 6, a trace 1 to 5; hostile data takes
/// 100.
const FOR_A_BYTE: usize = 32;
/// Memory for each stored byte, for the values of a snapshot. An entry of its history takes some
/// 400 bytes of memory and at least ten stored ones. Hostile compressed data could take a hundred
/// times as much.
pub(super) const VALUES: usize = 512;
/// The same for events of a line each. Recorded traces take 5 to 6 bytes for a byte stored by gzip.
pub(super) const EVENTS: usize = 128;
/// Unpacked bytes of any input, and for each stored byte: gzip makes at most 1032 of one.
const UNPACKED: [u64; 2] = [256 << 20, 1032];

/// Counts the bytes read, and limits memory by them. Clones share the counters.
#[derive(Debug, Clone, Default)]
pub(super) struct Allowance(Rc<Counters>);

#[derive(Debug, Default)]
struct Counters {
    /// Bytes of the file.
    stored: Cell<u64>,
    /// Output of the decoder.
    unpacked: Cell<u64>,
    /// Bytes that were parsed.
    content: Cell<u64>,
}

impl Allowance {
    /// Counts the bytes of the file.
    pub(super) fn stored<R: Read>(&self, inner: R) -> impl Read + use<R> {
        Counted { inner, allowance: self.clone(), counter: |counters| &counters.stored }
    }

    /// Counts the output of a decoder, and refuses more than a recording has.
    pub(super) fn unpacked<R: Read>(&self, inner: R) -> impl Read + use<R> {
        Counted { inner, allowance: self.clone(), counter: |counters| &counters.unpacked }
    }

    /// Counts the bytes of the content.
    pub(super) fn content<R: Read>(&self, inner: R) -> impl Read + use<R> {
        Counted { inner, allowance: self.clone(), counter: |counters| &counters.content }
    }

    /// Refuses to use more memory than a recording of this size would; `for_a_stored_byte` is
    /// [`VALUES`] or [`EVENTS`].
    pub(super) fn check(&self, used: usize, for_a_stored_byte: usize) -> Result<(), Reason> {
        let Counters { stored, content, .. } = &*self.0;
        let allowed = |bytes: u64, each: usize| usize::try_from(bytes).unwrap_or(usize::MAX).saturating_mul(each);
        let most = allowed(stored.get(), for_a_stored_byte).min(allowed(content.get(), FOR_A_BYTE));
        if used > most.saturating_add(FOR_ANY) { Err(Reason::TooDense { stored: stored.get() }) } else { Ok(()) }
    }

    /// For tests: as if so much had been read.
    #[cfg(test)]
    pub(super) fn read(stored: usize, content: usize) -> Self {
        let allowance = Self::default();
        allowance.0.stored.set(stored as u64);
        allowance.0.content.set(content as u64);
        allowance
    }
}

struct Counted<R> {
    inner: R,
    allowance: Allowance,
    counter: fn(&Counters) -> &Cell<u64>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(into)?;
        let counters = &*self.allowance.0;
        let counter = (self.counter)(counters);
        counter.set(counter.get() + count as u64);
        let (stored, [any, each]) = (counters.stored.get(), UNPACKED);
        if counters.unpacked.get() > stored.saturating_mul(each).saturating_add(any) {
            return Err(Reason::TooDense { stored }.into());
        }
        Ok(count)
    }
}
