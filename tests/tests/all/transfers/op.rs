//! The steps that programs of transfers are made of, and how to draw random ones.

use aquifer_tests::prelude::*;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

/// Lengths of buffers: none, small, and larger than what the calling thread copies by itself.
pub(super) const LENGTHS: [usize; 5] = [0, 1, 1000, 70_000, 300_000];

/// A step. Numbers pick among the objects that there are.
#[derive(Clone, Debug)]
pub(super) enum Op {
    NewDevice(usize),
    NewPinned(usize, u64),
    DropDevice(usize),
    DropPinned(usize),
    Write(usize, u64),
    Read(usize),
    Upload { pinned: usize, device: usize, on: Option<usize> },
    Download { device: usize, pinned: usize, on: Option<usize> },
    Copy { from: usize, to: usize },
    OnHost { from: usize, to: usize, width: Option<usize> },
    Fill { device: usize, value: u8 },
    FromVec { device: usize, seed: u64 },
    ToDevice { length: usize, seed: u64, then: bool },
    ToVec(usize),
    ToHost(usize),
    Rows { pinned: usize, device: usize, width: usize },
    RowsFromVec { device: usize, seed: u64, width: usize },
    RowsToVec { device: usize, width: usize },
    Batch { devices: Vec<usize>, seed: u64 },
    Borrowed { device: usize, seed: u64 },
    Panics(usize),
    Finish { pending: usize, how: How },
    Check(usize),
    Keep(usize),
    Spill(usize),
    Pressure,
    Access { index: usize, seed: Option<u64>, stream: usize },
    DropSpillable(usize),
    ToPeer(usize),
    FromPeer { peer: usize, device: usize },
    CheckPeer(usize),
    DropPeer(usize),
    Trim,
    Synchronize,
    Fault { operation: Operation, nth: u64, code: Code },
}

#[derive(Clone, Copy, Debug)]
pub(super) enum How {
    Wait,
    Await,
    Poll,
    Drop,
    Forget,
    Cancel,
}

pub(super) fn op(faults: bool) -> impl Strategy<Value = Op> {
    let pick = 0usize..100;
    let on = prop_oneof![2 => Just(None), 1 => (0usize..2).prop_map(Some)];
    let how = prop_oneof![
        Just(How::Wait),
        Just(How::Await),
        Just(How::Poll),
        Just(How::Drop),
        Just(How::Forget),
        Just(How::Cancel)
    ];
    let failing = prop_oneof![
        Just(Operation::CopyToDevice),
        Just(Operation::CopyToHost),
        Just(Operation::CopyOnDevice),
        Just(Operation::Copy2d),
        Just(Operation::CopyBatch),
        Just(Operation::HostAlloc),
        Just(Operation::HostFree),
        Just(Operation::Record),
        Just(Operation::Wait),
        Just(Operation::QueryEvent),
        Just(Operation::SynchronizeEvent),
        Just(Operation::Alloc),
        Just(Operation::Map),
    ];
    // Codes that leave the device alive.
    let code = prop_oneof![Just(Code::OUT_OF_MEMORY), Just(Code::INVALID_VALUE), Just(Code(999))];
    let steps = prop_oneof![
        3 => (0usize..5).prop_map(Op::NewDevice),
        3 => (0usize..5, any::<u64>()).prop_map(|(length, seed)| Op::NewPinned(length, seed)),
        1 => pick.clone().prop_map(Op::DropDevice),
        1 => pick.clone().prop_map(Op::DropPinned),
        2 => (pick.clone(), any::<u64>()).prop_map(|(pinned, seed)| Op::Write(pinned, seed)),
        2 => pick.clone().prop_map(Op::Read),
        6 => (pick.clone(), pick.clone(), on.clone()).prop_map(|(pinned, device, on)| Op::Upload { pinned, device, on }),
        6 => (pick.clone(), pick.clone(), on).prop_map(|(pinned, device, on)| Op::Download { device, pinned, on }),
        3 => (pick.clone(), pick.clone()).prop_map(|(from, to)| Op::Copy { from, to }),
        2 => (pick.clone(), pick.clone(), option::of(1usize..40))
            .prop_map(|(from, to, width)| Op::OnHost { from, to, width }),
        1 => (pick.clone(), any::<u8>()).prop_map(|(device, value)| Op::Fill { device, value }),
        4 => (pick.clone(), any::<u64>()).prop_map(|(device, seed)| Op::FromVec { device, seed }),
        2 => (0usize..5, any::<u64>(), any::<bool>()).prop_map(|(length, seed, then)| Op::ToDevice { length, seed, then }),
        4 => pick.clone().prop_map(Op::ToVec),
        2 => pick.clone().prop_map(Op::ToHost),
        2 => (pick.clone(), pick.clone(), 1usize..40).prop_map(|(pinned, device, width)| Op::Rows { pinned, device, width }),
        2 => (pick.clone(), any::<u64>(), 1usize..40)
            .prop_map(|(device, seed, width)| Op::RowsFromVec { device, seed, width }),
        2 => (pick.clone(), 1usize..40).prop_map(|(device, width)| Op::RowsToVec { device, width }),
        2 => (vec(pick.clone(), 1..8), any::<u64>()).prop_map(|(devices, seed)| Op::Batch { devices, seed }),
        2 => (pick.clone(), any::<u64>()).prop_map(|(device, seed)| Op::Borrowed { device, seed }),
        1 => pick.clone().prop_map(Op::Panics),
        8 => (pick.clone(), how).prop_map(|(pending, how)| Op::Finish { pending, how }),
        2 => pick.clone().prop_map(Op::Check),
        2 => pick.clone().prop_map(Op::Keep),
        2 => pick.clone().prop_map(Op::Spill),
        1 => Just(Op::Pressure),
        4 => (pick.clone(), any::<Option<u64>>(), 0usize..2)
            .prop_map(|(index, seed, stream)| Op::Access { index, seed, stream }),
        1 => pick.clone().prop_map(Op::DropSpillable),
        2 => pick.clone().prop_map(Op::ToPeer),
        2 => (pick.clone(), pick.clone()).prop_map(|(peer, device)| Op::FromPeer { peer, device }),
        1 => pick.clone().prop_map(Op::CheckPeer),
        1 => pick.prop_map(Op::DropPeer),
        1 => Just(Op::Trim),
        1 => Just(Op::Synchronize),
    ];
    let fault = (failing, 1u64..6, code).prop_map(|(operation, nth, code)| Op::Fault { operation, nth, code });
    if faults { prop_oneof![50 => steps, 1 => fault].boxed() } else { steps.boxed() }
}
