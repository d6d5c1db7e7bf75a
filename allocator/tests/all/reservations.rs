//! Reservations: access guards that conflict come after all the work that a reservation was for,
//! on any thread.

use std::sync::{Arc, mpsc};
use std::thread;

use aquifer_allocator::{AccessGuard, Allocator, Config, Reservation, Storage};
use aquifer_device::{AccessKind, Device, Stream, executor};
use aquifer_sim::{SimConfig, SimDriver};

const BYTES: u64 = 1 << 16;

fn bench() -> (Device, Arc<Storage>, [Stream; 2]) {
    let device = Device::new(SimDriver::new(SimConfig::new(64 << 20)));
    let allocator = Allocator::new(&device, Config::default()).unwrap();
    let streams = [device.stream().unwrap(), device.stream().unwrap()];
    let buffer = allocator.alloc_storage(BYTES, 1, &streams[0]).unwrap();
    (device, buffer, streams)
}

/// What the stream reads, under an access guard.
fn read(stream: &Stream, buffer: &Arc<Storage>) -> Vec<u8> {
    let mut bytes = vec![0; 1 << 16];
    let _access = AccessGuard::acquire(stream, &[(buffer, AccessKind::Read)]).unwrap();
    stream.download_blocking(&mut bytes, buffer.ptr()).unwrap();
    bytes
}

fn fill(stream: &Stream, reservation: &Reservation, buffer: &Storage, value: u8) {
    for part in 0..16 {
        let _access = reservation.access(stream).unwrap();
        stream.fill(buffer.ptr().offset(part * BYTES / 16), value, BYTES / 16).unwrap();
    }
}

#[test]
fn readers_and_writers_come_after_work_that_memory_was_reserved_for() {
    let (device, buffer, [one, two]) = bench();
    for round in 1..50 {
        let reservation = Reservation::acquire(&buffer, AccessKind::Write).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                let reservation = reservation;
                fill(&one, &reservation, &buffer, round);
            });
            // Gets its guard only once the reservation is gone, however late the thread starts.
            assert_eq!(read(&two, &buffer), vec![round; 1 << 16], "round {round}");
        });
    }
    assert_eq!(device.driver().take_violation(), None);
}

#[test]
fn reservations_to_read_let_readers_pass_and_keep_writers_out() {
    let (device, buffer, [one, two]) = bench();
    fill(&one, &Reservation::acquire(&buffer, AccessKind::Write).unwrap(), &buffer, 3);
    let (first, second) = (
        Reservation::acquire(&buffer, AccessKind::Read).unwrap(),
        Reservation::acquire(&buffer, AccessKind::Read).unwrap(),
    );
    assert_eq!(read(&two, &buffer), vec![3; 1 << 16]);
    let (tell, told) = mpsc::channel();
    thread::scope(|scope| {
        let (one, buffer) = (&one, &buffer);
        scope.spawn(move || {
            let reservation = Reservation::acquire(buffer, AccessKind::Write).unwrap();
            tell.send(()).unwrap();
            fill(one, &reservation, buffer, 4);
        });
        drop(first);
        // Whatever the thread does, it cannot have reserved: the second reservation still holds.
        assert!(told.try_recv().is_err());
        {
            let _access = second.access(&two).unwrap();
        }
        drop(second);
        told.recv().unwrap();
    });
    assert_eq!(read(&two, &buffer), vec![4; 1 << 16]);
    assert_eq!(device.driver().take_violation(), None);
}

#[test]
fn a_guard_that_waits_for_a_reservation_holds_no_other_memory() {
    let (device, reserved, [one, two]) = bench();
    let allocator = Allocator::new(&device, Config::default()).unwrap();
    let free: Arc<Storage> = allocator.alloc_storage(BYTES, 1, &one).unwrap();
    let reservation = Reservation::acquire(&reserved, AccessKind::Write).unwrap();
    thread::scope(|scope| {
        let both = scope.spawn(|| {
            let memory = [(&free, AccessKind::Write), (&reserved, AccessKind::Write)];
            let _access = AccessGuard::acquire(&two, &memory).unwrap();
        });
        // The thread that is to end the reservation needs the other memory first. Were that held,
        // neither could go on.
        for _ in 0..100 {
            let _access = AccessGuard::acquire(&one, &[(&free, AccessKind::Write)]).unwrap();
            thread::yield_now();
        }
        drop(reservation);
        both.join().unwrap();
    });
    assert_eq!(device.driver().take_violation(), None);
}

#[test]
fn memory_is_not_reused_while_it_is_reserved() {
    let (device, _, [one, _]) = bench();
    let allocator = Allocator::new(&device, "quarantine_mb:0").unwrap();
    let alloc = || -> Arc<Storage> { allocator.alloc_storage(BYTES, 1, &one).unwrap() };
    let buffer = alloc();
    let ptr = buffer.ptr();
    let reservation = Reservation::acquire(&buffer, AccessKind::Write).unwrap();
    drop(buffer);
    assert_ne!(alloc().ptr(), ptr);
    drop(reservation);
    assert_eq!(alloc().ptr(), ptr);
}

#[test]
fn simulated_threads_wait_for_a_reservation_and_go_on_when_it_ends() {
    for seed in 0..50 {
        let (device, buffer, [one, two]) = bench();
        let reservation = Reservation::acquire(&buffer, AccessKind::Write).unwrap();
        let (filled, read_by) = (buffer.clone(), two.clone());
        let bodies: Vec<executor::Body> = vec![
            Box::new(move || assert_eq!(read(&read_by, &buffer), vec![7; 1 << 16])),
            Box::new(move || {
                fill(&one, &reservation, &filled, 7);
                drop(reservation);
            }),
        ];
        executor::run(seed, 10_000, bodies).unwrap();
        assert_eq!(device.driver().take_violation(), None);
    }
}
