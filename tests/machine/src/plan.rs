//! The program of a seed: a device, its allocators, and the steps of several threads.

use std::fmt;

use aquifer_allocator::config::Backing;
use aquifer_device::{Code, Operation};

use crate::random::Random;

const MIB: u64 = 1 << 20;

/// Codes of injected faults: calls that lack memory, and others.
const CODES: [Code; 4] = [Code(999), Code(999), Code::OUT_OF_MEMORY, Code::INVALID_VALUE];

/// Calls after whose failure there is something to undo or to try again, and that are too rare for
/// a fault of any call to hit them.
const AIMED_AT: [Operation; 8] = {
    use Operation::{CreatePhysical, EndCapture, Free, LaunchGraph, Map, ReleasePhysical, SetAccess, Unmap};
    [CreatePhysical, Free, Map, ReleasePhysical, SetAccess, Unmap, EndCapture, LaunchGraph]
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
    /// Options of the second allocator.
    pub second: String,
    /// How many steps of all threads the device lags behind, as far as the host can see.
    pub lag: u64,
    /// Sizes of the ring that stages transfers: the bytes of a chunk, and the threads that copy.
    pub chunk_bytes: usize,
    /// See there.
    pub copiers: usize,
    /// Large buffers get a pattern that the device writes and verifies as a whole.
    pub is_patterned: bool,
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

/// What falls asleep or wakes up.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Asleep {
    /// All memory.
    All,
    /// All memory; the contents of the buffers with the second tag are saved in any case.
    AllButTag,
    /// The buffers with the first tag.
    FirstTag,
    /// The buffers with the second tag.
    SecondTag,
    /// All that has no tag.
    Untagged,
    /// A private pool of the thread.
    Pool(u32),
}

/// How a bare pointer is freed.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Freeing {
    /// Once its stream is ordered after all uses.
    OnItsStream,
    /// In the order of another stream, which is ordered after all uses.
    OnStream(u32),
    /// After the streams of all uses were recorded.
    Recorded,
}

/// One step of a thread. Numbers pick streams, buffers, pools and graphs that the thread has when
/// the step runs.
#[derive(Debug, Clone, Copy)]
#[expect(missing_docs, reason = "each variant explains its fields")]
#[non_exhaustive]
pub enum Step {
    /// Allocates a buffer with no tag, the first or the second, and writes it.
    Alloc { stream: u32, bytes: u64, tag: u32 },
    /// Allocates a buffer in a private pool and writes it.
    AllocFrom { pool: u32, stream: u32, bytes: u64 },
    /// Allocates bare memory, which work uses without access guards, and writes it: a raw pointer,
    /// or an allocation with an alignment of so many bits if that is not 0.
    AllocRaw { stream: u32, bytes: u64, align: u32 },
    /// Reads bare memory back and compares it on any stream, ordered after earlier writes alone, or
    /// also writes it. Records the stream at once, or leaves that to the free.
    UseRaw { pick: u32, stream: u32, writes: bool, is_recorded: bool },
    /// Frees bare memory.
    FreeRaw { pick: u32, how: Freeing },
    /// Frees a pointer that is not live as a raw one: within a block, or of an allocation.
    FreeWrong(u32),
    /// Frees so many pieces of bare memory, not one after the other, each followed by a small
    /// allocation.
    Replace { pick: u32, stream: u32, blocks: u32, bytes: u64 },
    /// Pins the mappings of bare memory.
    Pin(u32),
    /// Ends one of the pins.
    Unpin(u32),
    /// Leaves bare memory to the other threads.
    GiveRaw(u32),
    /// Drops a buffer.
    Drop(u32),
    /// Reads a buffer back and compares it.
    Verify { pick: u32, stream: u32 },
    /// Writes a buffer.
    Write { pick: u32, stream: u32 },
    /// Copies one buffer to another.
    Copy { from: u32, to: u32, stream: u32 },
    /// Uploads new contents through the transfer runtime: from ordinary memory, or from a file,
    /// which other threads read. Waits for all uploads, or leaves them to the next use. Keeps the
    /// handle of this one, or drops it.
    Upload { pick: u32, stream: u32, is_file: bool, waits: bool, is_kept: bool },
    /// Copies a buffer to a vector, through the transfer runtime, and compares it.
    ToVec { pick: u32, stream: u32 },
    /// Leaves a buffer to the other threads.
    Give(u32),
    /// Takes what another thread left.
    Take,
    /// Makes one stream wait for another.
    Wait { stream: u32, on: u32 },
    /// Waits on the host for a stream.
    Synchronize(u32),
    /// Keeps a stream busy for that many microseconds.
    Stall { stream: u32, us: u64 },
    /// Lets that many microseconds pass on the device.
    Advance(u64),
    /// Replaces a stream by a new one.
    NewStream { stream: u32, blocking: bool },
    /// Captures a write of scratch memory of a private pool.
    Capture { pool: u32, stream: u32, bytes: u64, ending: Ending },
    /// Launches a graph.
    Launch { graph: u32, stream: u32 },
    /// Drops a graph of either kind.
    DropGraph(u32),
    /// Leaves a graph of either kind to the other threads.
    GiveGraph(u32),
    /// Captures a graph that orders itself, with memory of a private pool or of its own, several
    /// streams, temporaries, and bodies of a SWITCH.
    MakeGraph { pool: u32, stream: u32, bytes: u64, temporary: u64 },
    /// Launches such a graph on two streams, with new inputs, and compares the outputs.
    ReplayGraph { graph: u32, stream: u32 },
    /// Drops the last handle of what such a graph reads, and allocates an equal buffer.
    DropInput { graph: u32, stream: u32 },
    /// Makes a private pool. It lends free memory, or that of its graphs while they are idle.
    CreatePool { lends: bool, lends_when_idle: bool, no_split: bool },
    /// Drops a private pool.
    DropPool(u32),
    /// Leaves a private pool to the other threads.
    GivePool(u32),
    /// Gives the unused memory of a private pool back.
    EmptyPool(u32),
    /// Sends this thread's requests to a private pool from now on.
    Route(u32),
    /// Ends that.
    EndRoute(u32),
    /// Allocates exportable memory, makes a buffer of it and writes it.
    AllocExportable { stream: u32, bytes: u64 },
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
    /// An allocator takes pieces of this size until it is refused one, and then keeps so many.
    Fill { second: bool, stream: u32, bytes: u64, keep: u32 },
    /// Falls asleep, with or without saving contents; either waits for what keeps memory awake, or
    /// is refused then.
    Sleep { what: Asleep, save: bool, waits: bool },
    /// Wakes up.
    Wake(Asleep),
    /// Reads statistics and takes a snapshot.
    Look,
    /// Makes calls of the driver fail at this rate, in thousandths; 0 ends that.
    Faults(u32),
    /// Makes the nth call from now fail, or the nth one of an operation.
    Fault { nth: u64, operation: Option<Operation>, code: Code },
    /// The device is lost at the nth call from now.
    Lose(u64),
}

impl Step {
    /// True if calls of the driver fail from then on.
    pub fn injects_faults(&self) -> bool {
        let refuses = matches!(self, Step::Capture { ending: Ending::Refuse, .. });
        refuses || matches!(self, Step::Faults(_) | Step::Fault { .. } | Step::Lose(_))
    }
}

impl Plan {
    /// The plan of a seed.
    pub fn of_seed(seed: u64) -> Plan {
        Plan::of(seed, 4)
    }

    /// The plan of a seed for one thread.
    pub fn single(seed: u64) -> Plan {
        Plan::of(seed, 1)
    }

    fn of(seed: u64, threads_max: u32) -> Plan {
        let random = &mut Random::new(seed ^ 0x5eed);
        let capacity = u64::from(48 + random.below(200)) * MIB;
        let count = 1 + random.below(threads_max);
        let kind = Kind {
            faults: random.below(3) == 0,
            lost: random.below(20) == 0,
            sleeps: random.below(4) == 0,
            others: random.below(2) == 0,
            alone: count == 1,
            graphs: random.below(12) == 0,
            soaks: false,
        };
        let splits = kind.alone && !kind.faults && !kind.lost;
        let (options, second) = (options(random, splits), options(random, splits));
        let lag = if random.below(3) == 0 { random.size(1, 200) } else { 0 };
        let (chunk_bytes, copiers) = (4096 << random.below(6), 1 + random.below(3) as usize);
        let steps = 10 + random.below(70);
        // Otherwise most threads end before they have a pool.
        let first = (random.below(2) == 0).then_some(Step::CreatePool {
            lends: false,
            lends_when_idle: seed.is_multiple_of(4),
            no_split: false,
        });
        let thread = |random: &mut Random| first.into_iter().chain((0..steps).map(|_| step(random, &kind))).collect();
        let threads = (0..count).map(|_| thread(random)).collect();
        Plan { seed, capacity, options, second, lag, chunk_bytes, copiers, is_patterned: false, threads }
    }

    /// A plan for threads that no schedule interrupts, on any device: without faults, captures and
    /// sleep.
    pub fn of_soak(seed: u64, capacity: u64, options: &str, (threads, steps): (u16, u64)) -> Plan {
        let random = &mut Random::new(seed);
        let kind = Kind { soaks: true, ..Kind::default() };
        let steps_of = |number| steps / u64::from(threads) + u64::from(number < steps % u64::from(threads));
        let threads =
            (0..u64::from(threads)).map(|number| (0..steps_of(number)).map(|_| step(random, &kind)).collect());
        Plan { seed, is_patterned: true, ..Plan::of_steps(capacity, options, threads.collect()) }
    }

    /// These steps on a device that does not lag.
    pub fn of_steps(capacity: u64, options: &str, threads: Vec<Vec<Step>>) -> Plan {
        let (chunk_bytes, copiers, is_patterned) = (64 << 10, 2, false);
        let (options, second) = (options.to_owned(), String::new());
        Plan { seed: 1, capacity, options, second, lag: 0, chunk_bytes, copiers, is_patterned, threads }
    }

    /// The same plan with memory from one backing alone.
    #[must_use]
    pub fn on(mut self, backing: Backing) -> Plan {
        for options in [&mut self.options, &mut self.second] {
            let others = options.split(',').filter(|option| !option.is_empty() && !option.starts_with("backing"));
            *options = others.map(str::to_owned).chain([format!("backing:{backing}")]).collect::<Vec<_>>().join(",");
        }
        self
    }

    /// The same plan, whose first thread takes another step first.
    #[must_use]
    pub fn after(mut self, step: Step) -> Plan {
        self.threads.iter_mut().take(1).for_each(|steps| steps.insert(0, step));
        self
    }

    /// How many steps it has.
    pub fn step_count(&self) -> usize {
        self.threads.iter().map(Vec::len).sum()
    }

    /// The plan without some steps of one thread.
    pub(crate) fn without(&self, thread: usize, steps: std::ops::Range<usize>) -> Plan {
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
        write!(f, " and of the second allocator {:?}", self.second)?;
        if self.lag > 0 {
            write!(f, ", {} steps behind", self.lag)?;
        }
        for (number, steps) in self.threads.iter().enumerate().filter(|(_, steps)| !steps.is_empty()) {
            write!(f, "\n  thread {number}:")?;
            steps.iter().try_for_each(|step| write!(f, " {step:?};"))?;
        }
        Ok(())
    }
}

/// What a program may do beside the usual.
#[derive(Default)]
struct Kind {
    faults: bool,
    lost: bool,
    sleeps: bool,
    /// Another process and limits take memory away, so that what fits is not known.
    others: bool,
    /// There is one thread, so that it is known otherwise.
    alone: bool,
    /// Most of it is about graphs that order themselves.
    graphs: bool,
    /// Only what several threads may do at any time on any device.
    soaks: bool,
}

/// Options of an allocator. `splits` if memory that is in use may be copied elsewhere meanwhile: no
/// other thread works without access guards, and no call fails.
fn options(random: &mut Random, splits: bool) -> String {
    let mut options = Vec::new();
    options.push(["", "", "backing:segments"][random.below(3) as usize].to_owned());
    options.push(["", "", "cross_stream:off", "cross_stream:wait"][random.below(4) as usize].to_owned());
    if random.below(4) == 0 {
        options.push("no_cache:True".to_owned());
    }
    if random.below(4) == 0 {
        options.push(format!("headroom_mb:{}", 1 + random.below(30)));
    }
    if random.below(3) == 0 && options[0].is_empty() {
        options.push(format!("frame_mb:{}", 2 << random.below(4)));
    }
    if random.below(4) == 0 && options[0].is_empty() && splits {
        options.push("split_frames:on".to_owned());
    }
    if random.below(8) == 0 {
        options.push(format!("limit_mb:{}", 20 + random.below(180)));
    }
    if random.below(12) == 0 {
        options.push("throw_on_cudamalloc_oom:True".to_owned());
    }
    if random.below(8) == 0 {
        options.push(format!("history:{}", 1 + random.below(2000)));
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

/// Sizes at the borders of size classes, and some that no device has.
fn border(random: &mut Random) -> u64 {
    const BORDERS: [u64; 8] = [512, 1024, MIB / 2, MIB, 2 * MIB, 10 * MIB, 20 * MIB, 32 * MIB];
    match random.below(12) {
        0 => [0, 200 * MIB, 1 << 40, (1 << 60) - 1, 1 << 60, u64::MAX][random.below(6) as usize],
        _ => BORDERS[random.below(8) as usize] + u64::from(random.below(3)) - 1,
    }
}

fn step(random: &mut Random, kind: &Kind) -> Step {
    let step = any_step(random, kind);
    let is_alone = matches!(
        step,
        Step::Capture { .. } | Step::MakeGraph { .. } | Step::CreatePool { .. } | Step::Outlive { .. } | Step::Pin(_)
    );
    match step {
        Step::Stall { stream, us } if kind.soaks => Step::Stall { stream, us: us % 200 },
        _ if kind.soaks && is_alone => Step::Drop(0),
        step => step,
    }
}

fn any_step(random: &mut Random, kind: &Kind) -> Step {
    let (pick, stream, other, bytes) = (random.below(1 << 16), random.below(4), random.below(4), bytes(random));
    let small = 1 + bytes % (64 << 10);
    let kinds = if kind.graphs && other > 1 { 174..187 } else { 0..203 };
    match kinds.start + random.below(kinds.end - kinds.start) {
        0..=19 => Step::Alloc { stream, bytes, tag: pick % 3 },
        20..=24 => Step::AllocFrom { pool: pick, stream, bytes },
        25..=30 => Step::AllocRaw { stream, bytes, align: 0 },
        31..=35 => Step::UseRaw { pick, stream, writes: other < 3, is_recorded: pick % 3 == 0 },
        36..=39 => {
            let how = [Freeing::OnItsStream, Freeing::OnStream(pick / 8), Freeing::Recorded][other as usize % 3];
            Step::FreeRaw { pick, how }
        }
        40 | 41 => Step::GiveRaw(pick),
        42..=56 => Step::Drop(pick),
        57..=64 => Step::Verify { pick, stream },
        65..=70 => Step::Write { pick, stream },
        71..=74 => Step::Copy { from: pick, to: random.below(1 << 16), stream },
        75..=80 => {
            Step::Upload { pick, stream, is_file: other == 0, waits: random.below(3) == 0, is_kept: pick % 2 == 0 }
        }
        81..=83 => Step::ToVec { pick, stream },
        84..=87 => Step::Give(pick),
        88..=93 => Step::Take,
        94..=96 => Step::Wait { stream, on: other },
        97 | 98 => Step::Synchronize(stream),
        99..=102 => Step::Stall { stream, us: u64::from(random.below(40_000)) },
        103 => Step::NewStream { stream, blocking: other == 0 },
        104..=109 => {
            let dropped = if kind.faults && pick % 2 == 0 { Ending::Refuse } else { Ending::Drop };
            let ending = [dropped, Ending::Hand, Ending::Keep, Ending::Keep][other as usize];
            Step::Capture { pool: pick, stream, bytes: small, ending }
        }
        110..=113 => Step::Launch { graph: pick, stream },
        114 => Step::DropGraph(pick),
        115 => Step::GiveGraph(pick),
        116..=118 => Step::CreatePool { lends: other == 0, lends_when_idle: pick % 2 == 0, no_split: pick % 5 == 0 },
        119 => Step::DropPool(pick),
        120 => Step::GivePool(pick),
        121 => Step::EmptyPool(pick),
        122..=124 => Step::Route(pick),
        125..=127 => Step::EndRoute(pick),
        128 => Step::MakeGrowable(8 * MIB + bytes),
        129..=131 => Step::Resize { pick, stream, bytes },
        132 | 133 => Step::AllocExportable { stream, bytes },
        134 | 135 => Step::EmptyCache,
        136 => Step::TrimTo(bytes),
        137 if kind.others && other == 1 => Step::SetShare(8 * MIB + bytes),
        137 if kind.others => Step::SetLimit((other > 0).then_some(8 * MIB + bytes)),
        138 if kind.others => Step::OtherProcess(bytes % (40 * MIB)),
        139..=141 => Step::Second { stream, bytes },
        142 | 143 => Step::Fill { second: other < 2, stream, bytes: 256 * 1024 + bytes % (16 * MIB), keep: pick % 4 },
        144 => Step::Outlive { stream, bytes },
        145..=147 => Step::Look,
        148..=151 if kind.sleeps => Step::Sleep { what: asleep(pick), save: other > 0, waits: stream > 0 },
        152..=157 if kind.sleeps => Step::Wake(asleep(pick)),
        158..=160 if kind.faults => Step::Faults(if other == 0 { 20 } else { 0 }),
        161..=164 if kind.faults => {
            Step::Fault { nth: u64::from(1 + pick % 12), operation: None, code: CODES[other as usize] }
        }
        165 | 166 if kind.lost => Step::Lose(u64::from(1 + pick % 40)),
        167..=169 => Step::Drop(pick),
        170..=173 if kind.alone => {
            Step::Fill { second: other < 2, stream, bytes: MIB + bytes % (24 * MIB), keep: pick % 8 }
        }
        174..=176 if kind.faults => {
            let operation = AIMED_AT[pick as usize / 3 % AIMED_AT.len()];
            Step::Fault { nth: u64::from(1 + pick % 3), operation: Some(operation), code: CODES[other as usize] }
        }
        177 | 178 => Step::MakeGraph { pool: pick, stream, bytes: 1 + bytes % (8 << 10), temporary: bytes },
        179..=184 => Step::ReplayGraph { graph: pick, stream },
        185 | 186 => Step::DropInput { graph: pick, stream },
        187..=190 => Step::AllocRaw { stream, bytes: small, align: [1, 9 + pick % 13][other as usize % 2] },
        191 | 192 => Step::AllocRaw { stream, bytes: border(random), align: other % 2 },
        193..=196 => Step::UseRaw { pick, stream, writes: other == 0, is_recorded: pick % 2 == 0 },
        197 => Step::FreeWrong(pick),
        198 => Step::Replace { pick, stream, blocks: 1 + other * 10, bytes: 1 + bytes % 8192 },
        199 => Step::Pin(pick),
        200 => Step::Unpin(pick),
        201 => Step::Advance(1 + bytes % 5000),
        _ => Step::Alloc { stream, bytes: small, tag: pick % 3 },
    }
}

fn asleep(pick: u32) -> Asleep {
    match pick % 8 {
        0 | 1 => Asleep::All,
        2 => Asleep::AllButTag,
        3 => Asleep::FirstTag,
        4 => Asleep::SecondTag,
        5 => Asleep::Untagged,
        _ => Asleep::Pool(pick / 8),
    }
}
