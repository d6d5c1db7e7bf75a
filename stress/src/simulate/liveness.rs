//! Liveness: a request that fits is served, and once faults stop, everything works and goes back.

use std::ops::Range;

use aquifer::Allocator;
use aquifer::memory::AllocError;
use aquifer_allocator::config::Backing;
use aquifer_allocator::snapshot::BlockState;
use aquifer_device::{DeviceError, DevicePtr};

use super::Counts;
use super::world::{Handed, World, count};

const MIB: u64 = 1 << 20;

/// Driver calls within which a request is served once faults have stopped, for each MiB of the device.
const CALLS_MAX: u64 = 16;

impl World {
    /// Makes a request of one of the allocators. In a program of one thread, without faults, limits
    /// or another process, it is served if it fits.
    pub(super) fn request<T>(
        &self,
        of: &Allocator,
        bytes: u64,
        ask: impl FnOnce() -> Result<T, AllocError>,
    ) -> Option<T> {
        if !self.is_calm() {
            return self.served(ask());
        }
        let has_plenty = self.free() > of.config().headroom + 2 * bytes + 32 * MIB;
        let waits = if has_plenty { self.waits() } else { 0 };
        let outcome = ask();
        match &outcome {
            Ok(_) if has_plenty && self.waits() > waits => count(&self.counts.needless_waits),
            Err(AllocError::OutOfMemory(report)) => {
                count(&self.counts.liveness);
                let (need, room) = (need(of, bytes), self.room(of));
                if need <= room {
                    self.report(format!("a request of {need} bytes is refused, and {room} are free: {report}"));
                }
            }
            _ => {}
        }
        self.served(outcome)
    }

    /// What sleeps could not wake up for lack of memory: checks that it does not fit.
    pub(super) fn check_lack(&self, error: &DeviceError) {
        if self.is_alone() {
            count(&self.counts.liveness);
            let (need, room) = (self.memory.sleeping_bytes(), self.room(&self.memory));
            if need <= room {
                self.report(format!("{need} bytes cannot wake up, and {room} are free: {error}"));
            }
        }
    }

    /// Free bytes of the device.
    fn free(&self) -> u64 {
        self.device.info().total_bytes - self.driver.held_bytes()
    }

    /// Bytes that a request to an allocator can have, at least: what is free on the device, and what
    /// the allocators hold without need.
    fn room(&self, of: &Allocator) -> u64 {
        let idle: u64 = [&self.memory, &self.second].map(|memory| self.idle(memory)).iter().sum();
        (self.free() + idle).saturating_sub(of.config().headroom) / unit(of) * unit(of)
    }

    /// Bytes that an allocator holds without need: segments, and where memory is mapped the frames,
    /// that no live block touches. Memory of private pools counts if no graph was ever made.
    fn idle(&self, memory: &Allocator) -> u64 {
        let snapshot = memory.snapshot();
        let may_be_of_graph = |pool: (u64, u64)| pool != (0, 0) && self.has_graphs();
        let mut idle = 0;
        for segment in snapshot.segments.iter().filter(|segment| !may_be_of_graph(segment.segment_pool_id)) {
            if !segment.is_expandable {
                idle += if segment.allocated_size == 0 { segment.total_size } else { 0 };
                continue;
            }
            let mut free = segment.address..segment.address;
            for block in &segment.blocks {
                let end = block.address + block.size;
                // The host can wait for what other streams still use.
                if block.state == BlockState::ActiveAllocated {
                    idle += self.idle_frames(&free);
                    free = end..end;
                } else {
                    free.end = end;
                }
            }
            idle += self.idle_frames(&free);
        }
        idle
    }

    /// Bytes of the frames that lie within free memory.
    fn idle_frames(&self, free: &Range<u64>) -> u64 {
        let (mut at, mut idle) = (free.start, 0);
        while at < free.end
            && let Some(mapped) = self.driver.mapping_at(DevicePtr(at))
        {
            let end = mapped.ptr.0 + mapped.bytes;
            if free.start <= mapped.ptr.0 && end <= free.end {
                idle += mapped.bytes;
            }
            at = end;
        }
        idle
    }

    /// Ends the program: takes faults back, and checks that the allocators still work, give
    /// everything back, and serve what fits.
    pub(super) fn finish(self) -> Result<Counts, String> {
        if !self.has_failed() {
            self.end();
        }
        match self.found() {
            Some(found) => Err(found),
            None => Ok(self.counts.read()),
        }
    }

    fn end(&self) {
        self.driver.clear_faults();
        self.set_other_process(0);
        self.set_limit(None);
        let mut raw = Vec::new();
        for handed in self.take_all_handed() {
            match handed {
                Handed::Raw(one) => raw.push(one.ptr),
                Handed::Capture(capture, dropping) => dropping.finish(capture),
                other => drop(other),
            }
        }
        self.check_violations();
        let end = |what: &str, error: &dyn std::fmt::Display| self.report(format!("at the end, {what}: {error}"));
        if self.is_lost() {
            return;
        }
        if let Err(error) = self.memory.wake() {
            end("memory stays asleep", &error);
        }
        self.device.settle();
        if let Err(error) = self.device.synchronize() {
            end("the device cannot be waited for", &error);
        }
        for ptr in raw {
            if let Err(error) = self.memory.free_raw(ptr) {
                end("a pointer cannot be freed", &error);
            }
        }
        for memory in [&self.memory, &self.second] {
            count(&self.counts.liveness);
            if let Err(error) = memory.empty_cache() {
                end("the cache cannot be emptied", &error);
            }
            let held = (memory.memory_allocated(), memory.memory_reserved());
            if held != (0, 0) {
                end("memory is not given back", &format_args!("{} allocated, {} reserved", held.0, held.1));
            }
        }
        let total = self.device.info().total_bytes;
        match self.device.memory_info() {
            Ok(info) if info.free == total => {}
            Ok(info) => end("memory is missing on the device", &format_args!("{} of {total}", total - info.free)),
            Err(error) => end("the device does not say what is free", &error),
        }
        // Everything is free, or idle in the other allocator, so a request that fits is served.
        for memory in [&self.memory, &self.second, &self.memory] {
            count(&self.counts.liveness);
            let fits = (total - memory.config().headroom) / unit(memory) * unit(memory);
            let calls = self.driver.calls_made();
            match memory.alloc_bytes(fits, self.device.default_stream()) {
                Ok(served) => drop(served),
                Err(error) => end("a request that fits is refused", &error),
            }
            let calls = self.driver.calls_made() - calls;
            if calls > CALLS_MAX * (total / MIB) {
                end("a request takes too long", &format_args!("{calls} driver calls"));
            }
        }
        self.check_violations();
    }
}

/// Bytes of the device that a request takes at most.
fn need(of: &Allocator, bytes: u64) -> u64 {
    match of.backing() {
        Backing::Segments if bytes <= MIB => 2 * MIB,
        Backing::Segments if bytes < 10 * MIB => 20 * MIB,
        _ => bytes.next_multiple_of(unit(of)),
    }
}

/// The unit in which an allocator takes memory from the device.
fn unit(of: &Allocator) -> u64 {
    of.granule_bytes().unwrap_or(2 * MIB)
}
