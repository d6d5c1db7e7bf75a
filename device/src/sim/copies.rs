//! Copies of rows and batches of copies in the simulator. Each is one piece of work that touches
//! many ranges.

use super::calls::range;
use super::machine::Machine;
use super::queue::LEGACY;
use super::refused::{Answer, Refused};
use super::work::{Body, End, Part};
use crate::copies::{Copy2d, CopyEnd, CopyPart, Touched, first_overlap};
use crate::driver::RawStream;
use crate::error::{Code, Operation};

impl Machine {
    pub(super) fn copy_2d(&mut self, copy: &Copy2d, stream: RawStream) -> Answer<()> {
        let id = self.streams.find(stream)?;
        let Copy2d { dst, dst_pitch, src, src_pitch, width, height } = *copy;
        if dst_pitch < width || src_pitch < width {
            return Err(Refused::value(format!("rows of {width} bytes at pitches of {dst_pitch} and {src_pitch}")));
        }
        if width == 0 || height == 0 {
            return Ok(());
        }
        let too_long = || Refused::value(format!("{height} rows of {width} bytes are more than the device holds"));
        // At least one end is on the device, so rows that do not overlap there hold no more than
        // the device does.
        let bytes = width.checked_mul(height).filter(|&bytes| bytes <= self.memory.total()).ok_or_else(too_long)?;
        let parts = if dst_pitch == width && src_pitch == width {
            vec![self.part(dst, src, bytes)?]
        } else {
            let row = |row: u64| {
                let dst = row.checked_mul(dst_pitch).and_then(|offset| dst.further(offset)).ok_or_else(too_long)?;
                let src = row.checked_mul(src_pitch).and_then(|offset| src.further(offset)).ok_or_else(too_long)?;
                self.part(dst, src, width)
            };
            (0..height).map(row).collect::<Answer<_>>()?
        };
        self.submit_parts(id, Operation::Copy2d, parts)
    }

    pub(super) fn copy_batch(&mut self, copies: &[CopyPart], stream: RawStream) -> Answer<()> {
        let id = self.streams.find(stream)?;
        if id == LEGACY {
            return Err(Refused::new(Code::NOT_SUPPORTED, "there are no batches on the legacy default stream"));
        }
        if self.streams.get(id)?.capture.is_some() {
            self.invalidate_capture_of(id);
            return Err(Refused::new(Code::CAPTURE_UNSUPPORTED, "copies in a batch cannot be captured"));
        }
        let copies = copies.iter().filter(|copy| copy.bytes > 0);
        let parts = copies.map(|copy| self.part(copy.dst, copy.src, copy.bytes)).collect::<Answer<Vec<_>>>()?;
        if parts.is_empty() { Ok(()) } else { self.submit_parts(id, Operation::CopyBatch, parts) }
    }

    fn submit_parts(&mut self, id: u32, operation: Operation, parts: Vec<Part>) -> Answer<()> {
        refuse_overlap(&parts)?;
        self.submit(id, Body::Copy { operation, parts: parts.into() }).map(|_| ())
    }

    fn part(&self, dst: CopyEnd, src: CopyEnd, bytes: u64) -> Answer<Part> {
        if matches!((dst, src), (CopyEnd::Host(_), CopyEnd::Host(_))) {
            return Err(Refused::value("both ends of a copy are on the host"));
        }
        Ok(Part { to: self.end(dst, bytes)?, from: self.end(src, bytes)? })
    }

    fn end(&self, place: CopyEnd, bytes: u64) -> Answer<End> {
        match place {
            CopyEnd::Device(ptr) => range(ptr, bytes).map(End::Device),
            CopyEnd::Host(ptr) => {
                let part = usize::try_from(bytes).ok().and_then(|bytes| self.page_locked(ptr.0, bytes));
                let detail = || format!("{bytes} bytes at {:#x} are not page-locked memory of this device", ptr.0);
                part.map(End::Host).ok_or_else(|| Refused::value(detail()))
            }
        }
    }
}

/// Refuses copies if one of them writes what another one, or the same one, reads or writes.
fn refuse_overlap(parts: &[Part]) -> Answer<()> {
    let touched = |end: &End, writes| Touched { host: end.is_host(), range: end.range(), writes };
    let touched = parts.iter().flat_map(|part| [touched(&part.to, true), touched(&part.from, false)]);
    match first_overlap(touched.collect()) {
        None => Ok(()),
        Some(at) => Err(Refused::value(format!("a copy writes what another touches, at {at:#x}"))),
    }
}
