//! One thread of a soak.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::Duration;

use aquifer::device::DevicePtr;
use aquifer::kernels::Kernels;
use aquifer::{Buffer, Pending, PinnedBuffer, Stream};
use aquifer_allocator::AccessGuard;
use aquifer_device::AccessKind;
use aquifer_kernels::pattern_bytes;
use crossbeam::channel::Receiver;

use super::Shared;
use super::block::{Block, Compared, Findings};
use super::counts::{Counts, Mismatch};
use crate::exit::Failure;
use crate::random::Random;

/// The largest blocks that the host writes and reads, in bytes.
const HOST_MOST: u64 = 64 << 10;

/// The most downloads in flight.
const ARRIVING_MOST: usize = 4;

/// A thread's blocks and counts.
pub(super) struct Worker<'a> {
    shared: &'a Shared<'a>,
    number: usize,
    random: Random,
    inbox: Receiver<Block>,
    held: Vec<Block>,
    /// By stream.
    findings: Vec<Findings>,
    /// Blocks that are being copied to the host to be compared.
    arriving: VecDeque<(Pending<PinnedBuffer<u8>>, Compared, u64)>,
    counts: Counts,
}

impl<'a> Worker<'a> {
    pub(super) fn new(shared: &'a Shared<'a>, number: usize, inbox: Receiver<Block>) -> Result<Worker<'a>, Failure> {
        let findings = |stream: &Stream| {
            let buffer = shared.allocator.alloc(Kernels::FINDINGS_LEN, stream)?;
            Findings::new(buffer, &shared.kernels, stream)
        };
        Ok(Worker {
            shared,
            number,
            random: Random::new(shared.plan.seed.wrapping_add(number as u64 * 0x9e37)),
            inbox,
            held: Vec::new(),
            findings: shared.streams.iter().map(findings).collect::<Result<_, _>>()?,
            arriving: VecDeque::new(),
            counts: Counts::default(),
        })
    }

    /// Runs operations until it is time to stop or one fails.
    pub(super) fn run(&mut self) -> Result<(), Failure> {
        while let Some(operation) = self.shared.next() {
            self.held.extend(self.inbox.try_iter());
            if let Err(failure) = self.step(operation) {
                self.shared.failed.store(true, Ordering::Relaxed);
                return Err(failure);
            }
            self.counts.operations += 1;
        }
        Ok(())
    }

    /// Compares and frees the remaining blocks.
    pub(super) fn finish(mut self) -> Result<Counts, Failure> {
        self.held.extend(self.inbox.try_iter());
        let last = self.shared.begun.load(Ordering::Relaxed);
        while let Some(block) = self.held.pop() {
            self.compare(&block, last)?;
        }
        self.receive(0)?;
        (0..self.findings.len()).try_for_each(|stream| self.look(stream))?;
        Ok(self.counts)
    }

    fn step(&mut self, operation: u64) -> Result<(), Failure> {
        let choice = self.random.below(100);
        if choice < 45 || self.held.is_empty() {
            return self.allocate(operation);
        }
        let at = self.random.below(u32::try_from(self.held.len()).unwrap_or(u32::MAX)) as usize;
        match choice {
            45..65 => {
                let block = self.held.swap_remove(at);
                self.compare(&block, operation)
            }
            65..75 => {
                let block = self.held.swap_remove(at);
                let compared = self.compare(&block, operation);
                self.held.push(block);
                compared
            }
            75..84 => self.rewrite(at, operation),
            84..90 => self.send_there_and_back(at),
            90..94 => self.hand_over(at),
            94..97 => self.read_back(at, operation),
            97..99 => {
                let time = Duration::from_micros(self.random.below(200).into());
                Ok(self.shared.kernels.spin(&self.shared.streams[self.any_stream()], time)?)
            }
            _ => self.release(),
        }
    }

    fn any_stream(&mut self) -> usize {
        self.random.below(u32::try_from(self.shared.streams.len()).unwrap_or(u32::MAX)) as usize
    }

    /// Most requests are small; some are so large that memory runs out.
    fn any_size(&mut self) -> u64 {
        let limit = self.shared.plan.limit;
        match self.random.below(50) {
            0 => self.random.size((limit / 16).max(1), (limit / 3).max(2)),
            _ => self.random.size(1, (limit / 16).max(2)),
        }
    }

    /// A buffer. If memory is lacking, `None`, and some of the held blocks are compared and freed.
    fn buffer(&mut self, bytes: u64, stream: usize, operation: u64) -> Result<Option<Buffer<u8>>, Failure> {
        match self.shared.allocator.alloc(usize::try_from(bytes).unwrap_or(usize::MAX), &self.shared.streams[stream]) {
            Ok(buffer) => {
                self.counts.allocs += 1;
                Ok(Some(buffer))
            }
            Err(error) if error.is_out_of_memory() => {
                self.counts.ooms += 1;
                let kept = self.held.len() * 2 / 3;
                for block in self.held.split_off(kept) {
                    self.compare(&block, operation)?;
                }
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    fn allocate(&mut self, operation: u64) -> Result<(), Failure> {
        let (stream, bytes) = (self.any_stream(), self.any_size());
        let Some(buffer) = self.buffer(bytes, stream, operation)? else { return Ok(()) };
        let mut block = Block { buffer, pattern: self.random.bits(), written_by: operation };
        // Now and then the first use is on another stream.
        let writer = if self.random.below(4) == 0 { self.any_stream() } else { stream };
        let stream = &self.shared.streams[writer];
        if bytes <= HOST_MOST && self.random.below(8) == 0 {
            let mut content = self.shared.transfer.pinned().alloc(usize::try_from(bytes).unwrap_or(0))?;
            pattern_bytes(block.buffer.ptr(), block.pattern, &mut content.write()?);
            // Nothing waits for the copy or its source.
            drop(block.buffer.upload(&content, &self.shared.transfer)?);
            self.counts.uploads += 1;
        } else {
            self.shared.kernels.pattern_write(stream, &mut block.buffer, block.pattern)?;
        }
        self.counts.bytes_written += bytes;
        self.held.push(block);
        Ok(())
    }

    /// Writes another pattern to a block.
    fn rewrite(&mut self, at: usize, operation: u64) -> Result<(), Failure> {
        let (stream, pattern) = (self.any_stream(), self.random.bits());
        let block = &mut self.held[at];
        self.shared.kernels.pattern_write(&self.shared.streams[stream], &mut block.buffer, pattern)?;
        (block.pattern, block.written_by) = (pattern, operation);
        self.counts.bytes_written += block.buffer.bytes();
        Ok(())
    }

    /// Copies a block elsewhere, wipes it, and copies it back, on three streams.
    fn send_there_and_back(&mut self, at: usize) -> Result<(), Failure> {
        let [there, wipe, back] = [(); 3].map(|()| self.any_stream());
        let written_by = self.held[at].written_by;
        let bytes = self.held[at].buffer.bytes();
        let block = self.held.swap_remove(at);
        let elsewhere = self.buffer(bytes, there, written_by);
        self.held.push(block);
        let Some(elsewhere) = elsewhere? else { return Ok(()) };
        let Some(block) = self.held.last_mut() else { return Ok(()) };
        let shared = self.shared;
        copy(&shared.streams[there], &elsewhere, &block.buffer)?;
        shared.kernels.fill(&shared.streams[wipe], &mut block.buffer, 0u8)?;
        copy(&shared.streams[back], &block.buffer, &elsewhere)?;
        self.counts.copies += 2;
        Ok(())
    }

    fn hand_over(&mut self, at: usize) -> Result<(), Failure> {
        let to = self.random.below(u32::try_from(self.shared.outboxes.len()).unwrap_or(u32::MAX)) as usize;
        // Inboxes live until all blocks are freed.
        if self.shared.outboxes[to].send(self.held.swap_remove(at)).is_ok() {
            self.counts.handed_over += u64::from(to != self.number);
        }
        Ok(())
    }

    /// Sends a small block to the host, to be compared there; frees it.
    fn read_back(&mut self, at: usize, operation: u64) -> Result<(), Failure> {
        let block = self.held.swap_remove(at);
        let (ptr, bytes) = (block.buffer.ptr(), block.buffer.bytes());
        if bytes > HOST_MOST {
            return self.compare(&block, operation);
        }
        // On a stream of the transfers, or on any other one.
        let host = self.shared.transfer.pinned().alloc(block.buffer.len())?;
        let arriving = if self.random.below(2) == 0 {
            block.buffer.download(host, &self.shared.transfer)?
        } else {
            let stream = &self.shared.streams[self.any_stream()];
            block.buffer.download(host, &self.shared.transfer.on(stream)?)?
        };
        let compared = Compared { operation, written_by: block.written_by, ptr, bytes };
        self.arriving.push_back((arriving, compared, block.pattern));
        self.receive(ARRIVING_MOST)
    }

    /// Waits for downloads and compares them, until at most `left` are in flight.
    fn receive(&mut self, left: usize) -> Result<(), Failure> {
        while self.arriving.len() > left
            && let Some((arriving, compared, pattern)) = self.arriving.pop_front()
        {
            let host = arriving.wait()?;
            let is = host.read()?;
            let mut should = vec![0; is.len()];
            pattern_bytes(compared.ptr, pattern, &mut should);
            self.counts.downloads += 1;
            self.counts.blocks_verified += 1;
            self.counts.bytes_verified += compared.bytes;
            if let Some(first) = is.iter().zip(&should).position(|(is, should)| is != should) {
                let words = is.chunks(8).zip(should.chunks(8)).filter(|(is, should)| is != should).count() as u64;
                self.mismatch(compared, words, compared.ptr.offset(first as u64));
            }
        }
        Ok(())
    }

    /// Releases all or half of the cached memory.
    fn release(&mut self) -> Result<(), Failure> {
        self.counts.releases += 1;
        let allocator = self.shared.allocator;
        let kept = if self.random.below(2) == 0 { 0 } else { allocator.memory_reserved() / 2 };
        allocator.trim_to(kept)?;
        Ok(())
    }

    fn compare(&mut self, block: &Block, operation: u64) -> Result<(), Failure> {
        let stream = self.any_stream();
        let shared = self.shared;
        let full = self.findings[stream].compare(&shared.kernels, &shared.streams[stream], block, operation)?;
        self.counts.blocks_verified += 1;
        self.counts.bytes_verified += block.buffer.bytes();
        if full { self.look(stream) } else { Ok(()) }
    }

    fn look(&mut self, stream: usize) -> Result<(), Failure> {
        let shared = self.shared;
        if let Some((found, compared)) = self.findings[stream].look(&shared.kernels, &shared.streams[stream])? {
            self.mismatch(compared, found.words, found.first);
        }
        Ok(())
    }

    fn mismatch(&mut self, compared: Compared, words: u64, first: DevicePtr) {
        let (seed, thread) = (self.shared.plan.seed, self.number);
        self.counts.mismatches.push(Mismatch { seed, thread, compared, words, first });
    }
}

/// Enqueues a copy of all of `src`.
fn copy(stream: &Stream, dst: &Buffer<u8>, src: &Buffer<u8>) -> Result<(), Failure> {
    let _access =
        AccessGuard::acquire(stream, &[(src.storage(), AccessKind::Read), (dst.storage(), AccessKind::Write)])?;
    Ok(stream.copy(dst.ptr(), src.ptr(), src.bytes())?)
}
