//! The program of a seed: a device, its allocators, and the steps of several threads.

use std::fmt;

use aquifer_device::Operation;

use crate::random::Random;

const MIB: u64 = 1 << 20;

/// Calls after whose failure there is something to undo or to try again, and that are too rare for a
/// fault of any call to hit them.
const AIMED_AT: [Operation; 6] = {
    use Operation::{CreatePhysical, Free, Map, ReleasePhysical, SetAccess, Unmap};
    [CreatePhysical, Free, Map, ReleasePhysical, SetAccess, Unmap]
};

/// A program. The same plan always runs in the same way.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Plan {
    /// The seed that fixes the schedule of the threads and the order of the device's work.
    pub seed: u64,
    /// Memory of the device, in bytes.
    pub capacity: u64,
    /// Options of the allocator.
    pub options: String,
    /// The steps of each thread.
    pub threads: Vec<Vec<Step>>,
}

/// What becomes of a capture.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Ending {
    /// It is dropped.
    Drop,
    /// It is dropped, and the driver refuses to end it.
    Refuse,
    /// Another thread drops it.
    Hand,
    /// Its graph is kept, to be launched.
    Keep,
}

/// One step of a thread. Numbers pick streams, buffers, pools and graphs that the thread has when
/// the step runs.
#[derive(Debug, Clone, Copy)]
#[expect(missing_docs, reason = "each variant explains its fields")]
#[non_exhaustive]
pub enum Step {
    /// Allocates a buffer and writes it.
    Alloc { stream: u32, bytes: u64 },
    /// Allocates a buffer in a private pool and writes it.
    AllocFrom { pool: u32, stream: u32, bytes: u64 },
    /// Allocates memory for a bare pointer and writes it.
    AllocRaw { stream: u32, bytes: u64 },
    /// Frees the memory of a bare pointer in the order of its stream.
    FreeRaw(u32),
    /// Drops a buffer.
    Drop(u32),
    /// Reads a buffer back and compares it.
    Verify { pick: u32, stream: u32 },
    /// Writes a buffer.
    Write { pick: u32, stream: u32 },
    /// Copies one buffer to another.
    Copy { from: u32, to: u32, stream: u32 },
    /// Uploads new contents from ordinary memory, through the transfer runtime.
    Upload { pick: u32, stream: u32 },
    /// Copies a buffer to a vector, through the transfer runtime, and compares it.
    ToVec { pick: u32, stream: u32 },
    /// Leaves a buffer to the other threads.
    Give(u32),
    /// Takes a buffer, or something to be dropped, that another thread left.
    Take,
    /// Makes one stream wait for another.
    Wait { stream: u32, on: u32 },
    /// Waits on the host for a stream.
    Synchronize(u32),
    /// Keeps a stream busy for that many microseconds.
    Stall { stream: u32, us: u64 },
    /// Replaces a stream by a new one.
    NewStream { stream: u32, blocking: bool },
    /// Captures a write of scratch memory of a private pool.
    Capture { pool: u32, stream: u32, bytes: u64, ending: Ending },
    /// Launches a graph.
    Launch { graph: u32, stream: u32 },
    /// Drops a graph.
    DropGraph(u32),
    /// Makes a private pool.
    CreatePool { lends: bool },
    /// Drops a private pool.
    DropPool(u32),
    /// Gives the unused memory of a private pool back.
    EmptyPool(u32),
    /// Makes memory that grows.
    MakeGrowable(u64),
    /// Grows or shrinks it, and writes it.
    Resize { pick: u32, stream: u32, bytes: u64 },
    /// Gives unused memory back to the device.
    EmptyCache,
    /// Gives unused memory back until at most so much is held.
    TrimTo(u64),
    /// Sets the limit, or removes it.
    SetLimit(Option<u64>),
    /// Sets the limit to the share of the device's memory that so much is.
    SetShare(u64),
    /// Another process holds so much from now on.
    OtherProcess(u64),
    /// A second allocator of the device serves a request.
    Second { stream: u32, bytes: u64 },
    /// Another allocator serves a request, and is dropped before the buffer is.
    Outlive { stream: u32, bytes: u64 },
    /// Sleeps, with or without saving contents, and wakes up.
    Nap { save: bool },
    /// Reads statistics and takes a snapshot.
    Look,
    /// Makes calls of the driver fail at this rate, in thousandths; 0 ends that.
    Faults(u32),
    /// Makes the nth call from now fail, or the nth one of an operation.
    Fault { nth: u64, operation: Option<Operation> },
    /// The device is lost at the nth call from now.
    Lose(u64),
}

impl Plan {
    /// The plan of a seed.
    pub fn of_seed(seed: u64) -> Plan {
        let random = &mut Random::new(seed ^ 0x5eed);
        let capacity = u64::from(48 + random.below(200)) * MIB;
        let options = options(random);
        let kind = Kind { faults: random.below(3) == 0, lost: random.below(40) == 0, naps: random.below(6) == 0 };
        let count = 1 + random.below(4);
        let steps = 10 + random.below(70);
        // Otherwise most threads end before they have a pool.
        let first = (random.below(2) == 0).then_some(Step::CreatePool { lends: false });
        let thread = |random: &mut Random| first.into_iter().chain((0..steps).map(|_| step(random, &kind))).collect();
        let threads = (0..count).map(|_| thread(random)).collect();
        Plan { seed, capacity, options, threads }
    }

    /// How many steps it has.
    pub fn len(&self) -> usize {
        self.threads.iter().map(Vec::len).sum()
    }

    /// True if it has no steps.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The plan without some steps of one thread.
    pub(super) fn without(&self, thread: usize, steps: std::ops::Range<usize>) -> Plan {
        let mut plan = self.clone();
        if let Some(all) = plan.threads.get_mut(thread) {
            let end = steps.end.min(all.len());
            all.drain(steps.start.min(end)..end);
        }
        plan
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {}, a device of {} MiB, options {:?}", self.seed, self.capacity / MIB, self.options)?;
        for (number, steps) in self.threads.iter().enumerate().filter(|(_, steps)| !steps.is_empty()) {
            write!(f, "\n  thread {number}:")?;
            steps.iter().try_for_each(|step| write!(f, " {step:?};"))?;
        }
        Ok(())
    }
}

/// What a program may do beside the usual.
struct Kind {
    faults: bool,
    lost: bool,
    naps: bool,
}

fn options(random: &mut Random) -> String {
    let mut options = Vec::new();
    options.push(["", "", "backing:segments"][random.below(3) as usize].to_owned());
    options.push(["", "", "cross_stream:off", "cross_stream:wait"][random.below(4) as usize].to_owned());
    if random.below(4) == 0 {
        options.push("no_cache:True".to_owned());
    }
    if random.below(4) == 0 {
        options.push(format!("headroom_mb:{}", 1 + random.below(30)));
    }
    if random.below(4) == 0 {
        options.push(format!("garbage_collection_threshold:0.{}", 1 + random.below(9)));
    }
    if random.below(3) == 0 && options[0].is_empty() {
        options.push(format!("frame_mb:{}", 2 << random.below(4)));
    }
    options.retain(|option| !option.is_empty());
    options.join(",")
}

fn bytes(random: &mut Random) -> u64 {
    match random.below(8) {
        0..=2 => random.size(1, 4096),
        3 | 4 => random.size(4096, 2 * MIB),
        5 | 6 => random.size(MIB, 24 * MIB),
        _ => random.size(16 * MIB, 120 * MIB),
    }
}

fn step(random: &mut Random, kind: &Kind) -> Step {
    let (pick, stream, other, bytes) = (random.below(1 << 16), random.below(4), random.below(4), bytes(random));
    let small = 1 + bytes % (64 << 10);
    match random.below(128) {
        0..=19 => Step::Alloc { stream, bytes },
        20..=24 => Step::AllocFrom { pool: pick, stream, bytes },
        25..=28 => Step::AllocRaw { stream, bytes },
        29..=32 => Step::FreeRaw(pick),
        33..=47 => Step::Drop(pick),
        48..=55 => Step::Verify { pick, stream },
        56..=61 => Step::Write { pick, stream },
        62..=65 => Step::Copy { from: pick, to: random.below(1 << 16), stream },
        66..=68 => Step::Upload { pick, stream },
        69..=71 => Step::ToVec { pick, stream },
        72..=75 => Step::Give(pick),
        76..=80 => Step::Take,
        81..=83 => Step::Wait { stream, on: other },
        84 | 85 => Step::Synchronize(stream),
        86..=89 => Step::Stall { stream, us: u64::from(random.below(40_000)) },
        90 => Step::NewStream { stream, blocking: other == 0 },
        91..=96 => {
            let dropped = if kind.faults && pick % 2 == 0 { Ending::Refuse } else { Ending::Drop };
            let ending = [dropped, Ending::Hand, Ending::Keep, Ending::Keep][other as usize];
            Step::Capture { pool: pick, stream, bytes: small, ending }
        }
        97..=100 => Step::Launch { graph: pick, stream },
        101 => Step::DropGraph(pick),
        102..=104 => Step::CreatePool { lends: other == 0 },
        105 => Step::DropPool(pick),
        106 => Step::EmptyPool(pick),
        107 => Step::MakeGrowable(8 * MIB + bytes),
        108..=110 => Step::Resize { pick, stream, bytes },
        111 | 112 => Step::EmptyCache,
        113 => Step::TrimTo(bytes),
        114 if other == 1 => Step::SetShare(8 * MIB + bytes),
        114 => Step::SetLimit((other > 0).then_some(8 * MIB + bytes)),
        115 => Step::OtherProcess(bytes % (40 * MIB)),
        116 | 117 => Step::Second { stream, bytes },
        118 | 119 if kind.naps => Step::Nap { save: other > 0 },
        118..=120 => Step::Look,
        121 => Step::Outlive { stream, bytes },
        122 | 123 if kind.faults => Step::Faults(if other == 0 { 20 } else { 0 }),
        124 if kind.faults => Step::Fault { nth: u64::from(1 + pick % 12), operation: None },
        125 | 126 if kind.faults => {
            let operation = AIMED_AT[random.below(AIMED_AT.len() as u32) as usize];
            Step::Fault { nth: u64::from(1 + pick % 3), operation: Some(operation) }
        }
        127 if kind.lost => Step::Lose(u64::from(1 + pick % 40)),
        _ => Step::Drop(pick),
    }
}
