//! Liveness: a request that fits is served, and once faults stop, everything works and goes back.

use std::fmt::Display;
use std::ops::Range;
use std::sync::atomic::Ordering;

use aquifer::memory::AllocError;
use aquifer::{Allocator, Error};
use aquifer_allocator::config::Backing;
use aquifer_allocator::snapshot::BlockState;
use aquifer_device::{DeviceError, DevicePtr, ErrorKind};

use crate::held::Handed;
use crate::world::World;
use crate::{Counts, check};

const MIB: u64 = 1 << 20;

/// Driver calls within which a request is served once faults have stopped, for each MiB of the
/// device.
const CALLS_MAX: u64 = 16;

impl World {
    /// Makes a request of one of the allocators, of its heap or of memory outside of it. In a program
    /// of one thread, without faults, it is served if it fits.
    pub(crate) fn request<T>(
        &self,
        of: &Allocator,
        (bytes, is_of_heap): (u64, bool),
        ask: impl FnOnce() -> Result<T, Error>,
    ) -> Option<T> {
        self.end_uploads();
        if !self.is_calm() {
            return self.served(ask());
        }
        let plenty = bytes.saturating_mul(2).saturating_add(of.headroom() + 32 * MIB);
        let has_plenty = of.limit().is_none() && self.subject.free() > plenty;
        let waits = if has_plenty { self.waits() } else { 0 };
        let outcome = ask();
        match &outcome {
            Ok(_) if has_plenty && self.waits() > waits => self.counts.lock().needless_waits += 1,
            Err(Error::Alloc(AllocError::OutOfMemory(report))) => {
                self.counts.lock().liveness += 1;
                // Pools that do not split take segments.
                let of_pool = report.pool.map_or(0, |_| report.growth);
                let (need, room) = (need(of, bytes).max(of_pool), self.room(of));
                if need <= room && !of.config().fail_fast {
                    self.report(format!("a request of {need} bytes is refused, and {room} are free: {report}"));
                }
                if !self.outlives {
                    check::attribution(report);
                }
                check::refusal(of, report, is_of_heap.then_some(bytes));
            }
            _ => {}
        }
        self.served(outcome)
    }

    /// What a launch gave, or `None` where it may be refused. Memory that its graph lent comes back
    /// if it fits.
    pub(crate) fn launched<T>(&self, outcome: Result<T, Error>) -> Option<T> {
        if let Err(Error::Alloc(AllocError::OutOfMemory(report))) = &outcome
            && self.is_calm()
        {
            self.counts.lock().liveness += 1;
            let room = self.room(&self.memory);
            if report.growth <= room {
                self.report(format!("a launch of a graph that lent memory is refused, and {room} are free: {report}"));
            }
        }
        self.served(outcome)
    }

    /// What sleeps could not wake up for lack of memory: checks that it does not fit.
    pub(crate) fn check_lack(&self, error: &DeviceError) {
        if self.is_alone() {
            self.counts.lock().liveness += 1;
            let (need, room) = (self.memory.sleeping_bytes(), self.room(&self.memory));
            if need <= room {
                self.report(format!("{need} bytes cannot wake up, and {room} are free: {error}"));
            }
        }
    }

    /// Bytes that a request to an allocator can have, at least: what is free on the device, and
    /// what the allocators hold without need, as far as the limit allows it.
    fn room(&self, of: &Allocator) -> u64 {
        let idle: u64 = [&self.memory, &self.second].map(|memory| self.idle(memory)).iter().sum();
        let in_use = of.memory_reserved().saturating_sub(self.idle(of));
        let allowed = of.limit().map_or(u64::MAX, |limit| limit.saturating_sub(in_use));
        (self.subject.free() + idle).saturating_sub(of.headroom()).min(allowed) / unit(of) * unit(of)
    }

    /// Bytes that an allocator holds without need: segments, and where memory is mapped the frames,
    /// that no live block touches. Memory of private pools counts if no graph was ever made.
    fn idle(&self, memory: &Allocator) -> u64 {
        let snapshot = memory.snapshot();
        let may_be_of_graph = |pool: (u64, u64)| pool != (0, 0) && self.has_graphs.load(Ordering::Relaxed);
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
            && let Some(mapped) = self.subject.mapping_at(DevicePtr(at))
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
    pub(crate) fn finish(self) -> Result<Counts, String> {
        let stats = self.memory.stats();
        let (calls, operations) = (self.subject.calls_made(), Some(self.device.driver_calls()));
        if self.found.lock().is_none() {
            self.end();
        }
        match self.found.lock().take() {
            Some(found) => Err(found),
            None => Ok(Counts { stats, calls, operations, time_ns: self.subject.now_ns(), ..self.counts.into_inner() }),
        }
    }

    fn end(&self) {
        self.subject.clear_faults();
        self.subject.set_other_process_bytes(0);
        self.memory.set_limit(None);
        self.second.set_limit(None);
        drop(self.pin(std::mem::take));
        let (mut raw, mut pools) = (Vec::new(), Vec::new());
        for handed in std::mem::take(&mut *self.handed.lock()) {
            match handed {
                Handed::Raw(one) => raw.push(one),
                Handed::Pool(pool) => pools.push(pool),
                Handed::Capture(capture, dropping) => dropping.finish(capture),
                other => drop(other),
            }
        }
        self.check_violations();
        if self.lost.load(Ordering::Relaxed) {
            return;
        }
        let mut woken = self.memory.wake();
        // Free memory of pools that are open wakes up, too, and all that sleeps may not fit.
        if matches!(&woken, Err(AllocError::Device(error)) if error.is_out_of_memory()) {
            pools.clear();
            woken = self.memory.wake();
        }
        if let Err(error) = woken {
            self.report_end("memory stays asleep", &error);
        }
        // A capture that was dropped may be in the way of an event until the device is waited for.
        let waited = self.transfer.synchronize().or_else(|error| match error.device() {
            Some(of) if of.kind == ErrorKind::Capture && self.device.synchronize().is_ok() => {
                self.transfer.synchronize()
            }
            _ => Err(error),
        });
        if let Err(error) = waited {
            self.report_end("transfers cannot be waited for", &error);
        }
        if let Err(error) = self.device.synchronize() {
            self.report_end("the device cannot be waited for", &error);
        }
        for one in raw {
            self.watch().into_iter().for_each(|lagging| lagging.freed(one.ptr));
            if one.owner.is_none()
                && let Err(error) = self.memory.free_raw(one.ptr)
            {
                self.report_end("a pointer cannot be freed", &error);
            }
        }
        self.check_taken(self.memory.memory_reserved() + self.second.memory_reserved());
        // A request for all memory releases what emptying might forget, and the other way round.
        if self.asks_first {
            for pool in &pools {
                self.check_served(&self.memory, |bytes| {
                    let _: () = drop(pool.alloc_bytes(bytes, self.device.default_stream())?);
                    Ok(())
                });
            }
            self.check_all_served();
        }
        drop(pools);
        for memory in [&self.memory, &self.second] {
            self.counts.lock().liveness += 1;
            if let Err(error) = memory.empty_cache() {
                self.report_end("the cache cannot be emptied", &error);
            }
            let stats = memory.stats();
            let left = [stats.requested_bytes, stats.allocated_bytes, stats.active_bytes, stats.reserved_bytes];
            let left = left.map(|stat| stat.all.current);
            if left != [0; 4] {
                let [requested, allocated, active, reserved] = left;
                let left =
                    format_args!("{requested} requested, {allocated} allocated, {active} active, {reserved} reserved");
                self.report_end("memory is not given back", &left);
            }
        }
        self.check_taken(0);
        self.check_all_served();
        self.check_violations();
    }

    fn report_end(&self, what: &str, why: &dyn Display) {
        self.report(format!("at the end, {what}: {why}"));
    }

    /// Checks that no more of the device is taken than the allocators hold: memory of those that
    /// are gone is back.
    fn check_taken(&self, reserved: u64) {
        let total = self.device.info().total_bytes;
        match self.device.memory_info() {
            Ok(info) if total - info.free <= reserved => {}
            Ok(info) => self.report_end(
                "memory is missing on the device",
                &format_args!("{} bytes are taken, and {reserved} are reserved", total - info.free),
            ),
            Err(error) => self.report_end("the device does not say what is free", &error),
        }
    }

    /// Checks that each allocator serves a request for all memory, also while the other one holds
    /// it without need.
    fn check_all_served(&self) {
        for memory in [&self.memory, &self.second, &self.memory] {
            self.check_served(memory, |bytes| {
                let _: () = drop(memory.alloc_bytes(bytes, self.device.default_stream())?);
                Ok(())
            });
        }
    }

    /// Checks that a request for all memory is served, and soon: nothing is in use.
    fn check_served(&self, of: &Allocator, ask: impl FnOnce(u64) -> Result<(), Error>) {
        if of.config().fail_fast {
            return;
        }
        self.counts.lock().liveness += 1;
        let total = self.device.info().total_bytes;
        let fits = (total - of.headroom()) / unit(of) * unit(of);
        let calls = self.subject.calls_made();
        if let Err(error) = ask(fits) {
            self.report_end("a request that fits is refused", &error);
        }
        let calls = self.subject.calls_made() - calls;
        if calls > CALLS_MAX * (total / MIB) {
            self.report_end("a request takes too long", &format_args!("{calls} driver calls"));
        }
    }
}

/// Bytes of the device that a request takes at most.
fn need(of: &Allocator, bytes: u64) -> u64 {
    match of.backing() {
        Backing::Segments if bytes <= MIB => 2 * MIB,
        Backing::Segments if bytes < 10 * MIB => 20 * MIB,
        _ => bytes.checked_next_multiple_of(unit(of)).unwrap_or(u64::MAX),
    }
}

/// The unit in which an allocator takes memory from the device.
fn unit(of: &Allocator) -> u64 {
    of.granule_bytes().unwrap_or(2 * MIB)
}
