//! The steps that programs are made of.

use aquifer_device::Code;
use proptest::prelude::*;

use crate::{KIB, MIB};

/// How a block is given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FreeHow {
    /// By dropping its handle.
    Drop,
    /// By dropping its handle on another thread.
    OnThread,
    /// In the order of another stream.
    DropOn(usize),
}

/// What becomes of a capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureEnd {
    /// It is dropped.
    Drop,
    /// It is dropped on another thread, which cannot end that of a per-thread default stream.
    DropOnThread,
    /// Its graph is launched on a stream and dropped.
    Launch(usize),
}

/// One step of a program. Numbers pick streams, live blocks and pools that there are when the step
/// runs.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "each variant explains its fields")]
pub enum Op {
    /// Allocates; with a larger alignment if `align` is not 0, and on another thread if
    /// `on_thread`.
    Alloc { stream: usize, bytes: u64, align: u32, on_thread: bool },
    /// Allocates through the raw interface.
    AllocRaw { stream: usize, bytes: u64 },
    /// Allocates from a private pool.
    AllocFrom { pool: usize, stream: usize, bytes: u64 },
    /// Gives a block back, after comparing its contents if `verify`.
    Free { pick: usize, how: FreeHow, verify: bool },
    /// Frees through the raw interface a pointer that is not live there: freed before, inside a
    /// block, or of a handle.
    FreeWrong(usize),
    /// Gives so many blocks back, each followed by a small allocation, and looks at the allocator
    /// only after all.
    Replace { pick: usize, stream: usize, blocks: usize, bytes: u64 },
    /// Uses a block on a stream that is ordered after the block's other uses. `record` says which
    /// of the two ways makes that known: by `record_stream`, or by making the block's own stream
    /// wait before it is given back.
    Use { pick: usize, stream: usize, write: bool, record: bool },
    /// Makes one stream wait for another.
    Wait { stream: usize, on: usize },
    /// Waits on the host for a stream.
    Synchronize(usize),
    /// Lets virtual time pass, in µs.
    Advance(u64),
    /// Keeps a stream busy for that many µs.
    Stall(usize, u64),
    /// Replaces a stream by a new one; `blocking` ones synchronise with the legacy stream.
    NewStream { stream: usize, blocking: bool },
    /// Gives unused memory back to the device.
    EmptyCache,
    /// Gives unused memory back until at most that many MiB are held.
    TrimTo(u64),
    /// Sets the limit in MiB, or removes it.
    SetLimit(Option<u64>),
    /// Sets what other processes hold of the device, in MiB.
    OtherProcess(u64),
    /// Makes a private pool.
    CreatePool { use_on_oom: bool, no_split: bool },
    /// Drops a private pool.
    DropPool(usize),
    /// Gives a private pool's unused memory back.
    EmptyPool(usize),
    /// Routes this thread's allocations to a private pool.
    Route(usize),
    /// Ends one of the routes.
    EndRoute(usize),
    /// Captures a write of scratch memory from a private pool.
    Capture { stream: usize, pool: usize, bytes: u64, end: CaptureEnd },
    /// Allocates memory that can be exported.
    AllocExportable { stream: usize, bytes: u64 },
    /// Reserves addresses for memory that grows.
    MakeGrowable { stream: usize, capacity: u64 },
    /// Grows or shrinks one of these, for work on a stream that is ordered after its other uses.
    Resize { pick: usize, stream: usize, bytes: u64 },
    /// Pins the memory behind a block.
    Pin(usize),
    /// Ends one of the pins.
    Unpin(usize),
    /// Sleeps, with or without saving contents; so many blocks are given back meanwhile.
    Nap { save: bool, frees: usize },
    /// Makes the nth driver call from now fail.
    Fault(u64, Code),
    /// Takes back the faults that have not struck.
    ClearFaults,
}

/// Sizes around the borders of size classes, with a few too large for the device.
fn bytes() -> impl Strategy<Value = u64> {
    let near = |sizes: Vec<u64>| {
        (prop::sample::select(sizes), -1_i64..=1).prop_map(|(bytes, off)| bytes.saturating_add_signed(off))
    };
    prop_oneof![
        6 => 1..4 * KIB,
        4 => (1..200_u64).prop_map(|blocks| blocks * 512),
        4 => near(vec![512, KIB, 512 * KIB, MIB, 2 * MIB, 10 * MIB, 12 * MIB, 20 * MIB, 32 * MIB]),
        4 => 64 * KIB..2 * MIB,
        6 => MIB..10 * MIB,
        6 => 10 * MIB..40 * MIB,
        2 => 40 * MIB..160 * MIB,
        1 => prop::sample::select(vec![0, 200 * MIB, 1 << 40, (1 << 60) - 1, 1 << 60, u64::MAX]),
    ]
}

fn code() -> impl Strategy<Value = Code> {
    prop::sample::select(vec![Code::OUT_OF_MEMORY, Code::INVALID_VALUE, Code(999)])
}

fn how() -> impl Strategy<Value = FreeHow> {
    prop_oneof![
        6 => Just(FreeHow::Drop),
        1 => Just(FreeHow::OnThread),
        2 => (0_usize..8).prop_map(FreeHow::DropOn),
    ]
}

fn end() -> impl Strategy<Value = CaptureEnd> {
    prop_oneof![
        1 => Just(CaptureEnd::Drop),
        2 => Just(CaptureEnd::DropOnThread),
        2 => (0_usize..8).prop_map(CaptureEnd::Launch),
    ]
}

/// Any step; those with faults only where `faults` allows them.
pub fn op(faults: bool) -> impl Strategy<Value = Op> {
    let (stream, pick) = (0_usize..8, any::<u16>().prop_map(usize::from));
    let alloc = (stream.clone(), bytes(), prop_oneof![9 => Just(0_u32), 1 => 9_u32..=21], prop::bool::weighted(0.1));
    prop_oneof![
        30 => alloc.prop_map(|(stream, bytes, align, on_thread)| Op::Alloc { stream, bytes, align, on_thread }),
        2 => (stream.clone(), bytes()).prop_map(|(stream, bytes)| Op::AllocRaw { stream, bytes }),
        4 => (pick.clone(), stream.clone(), bytes())
            .prop_map(|(pool, stream, bytes)| Op::AllocFrom { pool, stream, bytes }),
        26 => (pick.clone(), how(), prop::bool::weighted(0.1))
            .prop_map(|(pick, how, verify)| Op::Free { pick, how, verify }),
        2 => (pick.clone(), stream.clone(), 1_usize..40, 1..8 * KIB)
            .prop_map(|(pick, stream, blocks, bytes)| Op::Replace { pick, stream, blocks, bytes }),
        1 => pick.clone().prop_map(Op::FreeWrong),
        24 => (pick.clone(), stream.clone(), any::<bool>(), any::<bool>())
            .prop_map(|(pick, stream, write, record)| Op::Use { pick, stream, write, record }),
        4 => (stream.clone(), stream.clone()).prop_map(|(stream, on)| Op::Wait { stream, on }),
        2 => stream.clone().prop_map(Op::Synchronize),
        4 => (1_u64..5000).prop_map(Op::Advance),
        6 => (stream.clone(), 1_u64..50_000).prop_map(|(stream, us)| Op::Stall(stream, us)),
        2 => (2_usize..8, any::<bool>()).prop_map(|(stream, blocking)| Op::NewStream { stream, blocking }),
        1 => Just(Op::EmptyCache),
        2 => (0_u64..100).prop_map(Op::TrimTo),
        1 => prop::option::weighted(0.6, 1_u64..200).prop_map(Op::SetLimit),
        1 => (0_u64..40).prop_map(Op::OtherProcess),
        1 => (any::<bool>(), any::<bool>()).prop_map(|(use_on_oom, no_split)| Op::CreatePool { use_on_oom, no_split }),
        1 => pick.clone().prop_map(Op::DropPool),
        1 => pick.clone().prop_map(Op::EmptyPool),
        1 => pick.clone().prop_map(Op::Route),
        1 => pick.clone().prop_map(Op::EndRoute),
        2 => (stream, pick, bytes(), end())
            .prop_map(|(stream, pool, bytes, end)| Op::Capture { stream, pool, bytes, end }),
        2 => (1_u64..12, code())
            .prop_map(move |(nth, code)| if faults { Op::Fault(nth, code) } else { Op::Advance(nth) }),
        1 => Just(if faults { Op::ClearFaults } else { Op::Advance(1) }),
    ]
}

/// Any step, those with dedicated memory included.
pub fn mixed(faults: bool) -> impl Strategy<Value = Op> {
    let (stream, pick) = (0_usize..8, any::<u16>().prop_map(usize::from));
    let bytes = || prop_oneof![1..64 * KIB, 64 * KIB..8 * MIB, 8 * MIB..60 * MIB];
    prop_oneof![
        20 => op(faults),
        1 => (stream.clone(), bytes()).prop_map(|(stream, bytes)| Op::AllocExportable { stream, bytes }),
        2 => (stream.clone(), MIB..300 * MIB).prop_map(|(stream, capacity)| Op::MakeGrowable { stream, capacity }),
        6 => (pick.clone(), stream, prop_oneof![5 => bytes(), 1 => Just(0)])
            .prop_map(|(pick, stream, bytes)| Op::Resize { pick, stream, bytes }),
        1 => pick.clone().prop_map(Op::Pin),
        1 => pick.prop_map(Op::Unpin),
        1 => (any::<bool>(), 0_usize..4).prop_map(|(save, frees)| Op::Nap { save, frees }),
    ]
}
