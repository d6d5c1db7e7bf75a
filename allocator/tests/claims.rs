//! Claims: turns that conflict come after all the work that a claim was for, whoever enqueues it.
#![expect(clippy::unwrap_used, reason = "a test fails where it is wrong")]

use std::sync::mpsc;
use std::thread;

use aquifer_allocator::{Allocator, Buffer, Claim, Config, Turn};
use aquifer_device::sim::{SimConfig, SimDriver};
use aquifer_device::{AccessKind, Device, Stream};

const BYTES: usize = 1 << 16;
const LEN: u64 = BYTES as u64;

fn bench() -> (Device, Buffer<u8>, [Stream; 2]) {
    let device = Device::new(SimDriver::new(SimConfig::new(64 << 20)));
    let allocator = Allocator::new(&device, Config::default()).unwrap();
    let streams = [device.stream().unwrap(), device.stream().unwrap()];
    let buffer = allocator.alloc(BYTES, &streams[0]).unwrap();
    (device, buffer, streams)
}

/// What the stream reads, in its turn.
fn read(stream: &Stream, buffer: &Buffer<u8>) -> Vec<u8> {
    let mut bytes = vec![0; BYTES];
    let _turn = Turn::take(stream, &[(buffer.storage(), AccessKind::Read)]).unwrap();
    stream.download_blocking(&mut bytes, buffer.ptr()).unwrap();
    bytes
}

fn fill(stream: &Stream, claim: &Claim, buffer: &Buffer<u8>, value: u8) {
    for part in 0..16 {
        let _turn = claim.turn(stream).unwrap();
        stream.fill(buffer.ptr().offset(part * LEN / 16), value, LEN / 16).unwrap();
    }
}

#[test]
fn readers_and_writers_come_after_everything_that_was_claimed_for() {
    let (device, buffer, [one, two]) = bench();
    for round in 1..50 {
        let claim = Claim::take(buffer.storage(), AccessKind::Write).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                let claim = claim;
                fill(&one, &claim, &buffer, round);
            });
            // Takes its turn only once the claim is gone, however late the thread starts.
            assert_eq!(read(&two, &buffer), vec![round; 1 << 16], "round {round}");
        });
    }
    assert_eq!(device.driver().take_violation(), None);
}

#[test]
fn claims_to_read_let_readers_pass_and_keep_writers_out() {
    let (device, buffer, [one, two]) = bench();
    fill(&one, &Claim::take(buffer.storage(), AccessKind::Write).unwrap(), &buffer, 3);
    let (first, second) = (
        Claim::take(buffer.storage(), AccessKind::Read).unwrap(),
        Claim::take(buffer.storage(), AccessKind::Read).unwrap(),
    );
    assert_eq!(read(&two, &buffer), vec![3; 1 << 16]);
    let (tell, told) = mpsc::channel();
    thread::scope(|scope| {
        let (one, buffer) = (&one, &buffer);
        scope.spawn(move || {
            let claim = Claim::take(buffer.storage(), AccessKind::Write).unwrap();
            tell.send(()).unwrap();
            fill(one, &claim, buffer, 4);
        });
        drop(first);
        // Whatever the thread does, it cannot have claimed: the second claim still holds.
        assert!(told.try_recv().is_err());
        {
            let _turn = second.turn(&two).unwrap();
        }
        drop(second);
        told.recv().unwrap();
    });
    assert_eq!(read(&two, &buffer), vec![4; 1 << 16]);
    assert_eq!(device.driver().take_violation(), None);
}

#[test]
fn a_turn_that_waits_for_a_claim_holds_no_other_memory() {
    let (device, claimed, [one, two]) = bench();
    let allocator = Allocator::new(&device, Config::default()).unwrap();
    let free: Buffer<u8> = allocator.alloc(BYTES, &one).unwrap();
    let claim = Claim::take(claimed.storage(), AccessKind::Write).unwrap();
    thread::scope(|scope| {
        let both = scope.spawn(|| {
            let memory =
                [(free.storage().as_ref(), AccessKind::Write), (claimed.storage().as_ref(), AccessKind::Write)];
            let _turn = Turn::take(&two, &memory).unwrap();
        });
        // The thread that is to end the claim needs the other memory first. Were that held, neither could go on.
        for _ in 0..100 {
            let _turn = Turn::take(&one, &[(free.storage(), AccessKind::Write)]).unwrap();
            thread::yield_now();
        }
        drop(claim);
        both.join().unwrap();
    });
    assert_eq!(device.driver().take_violation(), None);
}

#[test]
fn memory_is_not_reused_while_it_is_claimed() {
    let (device, _, [one, _]) = bench();
    let allocator = Allocator::new(&device, Config::default()).unwrap();
    let alloc = || -> Buffer<u8> { allocator.alloc(BYTES, &one).unwrap() };
    let buffer = alloc();
    let ptr = buffer.ptr();
    let claim = Claim::take(buffer.storage(), AccessKind::Write).unwrap();
    drop(buffer);
    assert_ne!(alloc().ptr(), ptr);
    drop(claim);
    assert_eq!(alloc().ptr(), ptr);
}
