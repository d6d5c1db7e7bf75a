//! Uploads that threads enqueue, and whose [`Pending`] was dropped: none is lost, and none fails in
//! silence.

use std::sync::{Arc, Condvar, Mutex};

use aquifer::buffer::{read, with};
use aquifer::memory::{Contents, SleepOptions};
use aquifer::transfer::Transfer;
use aquifer::{Buffer, Error};
use aquifer_allocator::AllocError;
use aquifer_device::{Code, Operation, RequestError, Stream, executor};
use aquifer_sim::Fault;
use aquifer_transfer::{Completion, DevicePart, HostSource, TransferError};

use super::{content, runtime, runtime_with, small};

const BYTES: usize = 600_000;

/// A source whose readers wait until it is opened, and may fail then.
#[derive(Default)]
struct Gate {
    is_open: Mutex<bool>,
    opened: Condvar,
    fails: bool,
}

impl Gate {
    fn open(&self) {
        *self.is_open.lock().unwrap() = true;
        self.opened.notify_all();
    }
}

impl HostSource for Gate {
    fn bytes(&self) -> u64 {
        BYTES as u64
    }

    fn read(&self, _: u64, into: &mut [u8]) -> Result<(), TransferError> {
        drop(self.opened.wait_while(self.is_open.lock().unwrap(), |is_open| !*is_open).unwrap());
        into.fill(3);
        if self.fails { Err(RequestError::Unsupported { what: "a test" }.into()) } else { Ok(()) }
    }
}

fn upload(transfer: &Transfer, source: &Arc<Gate>, buffer: &Buffer<u8>) -> Completion {
    let part = DevicePart { storage: buffer.storage(), ptr: buffer.ptr(), bytes: buffer.bytes() };
    transfer.upload_source(source.clone(), part).unwrap()
}

/// The stream may begin a capture, join one, or be captured by another library.
#[test]
fn an_upload_goes_on_beside_a_capture_of_its_stream() {
    for way in ["own", "announced", "joined"] {
        let (sim, transfer) = runtime(small());
        let [stream, first] = [(); 2].map(|()| transfer.device().stream().unwrap());
        let buffer = transfer.allocator().alloc::<u8>(BYTES, &stream).unwrap();
        // The copies come after it on whichever stream.
        stream.fill(buffer.ptr(), 1, BYTES as u64).unwrap();
        let source = Arc::<Gate>::default();
        drop(upload(&transfer.on(&stream).unwrap(), &source, &buffer));
        let (driver, joins) = (stream.driver(), transfer.device().create_event(false).unwrap());
        let ends = || {
            source.open();
            transfer.synchronize().unwrap();
        };
        match way {
            "own" => {
                let capture = stream.begin_capture().unwrap();
                ends();
                drop(capture.end().unwrap());
            }
            "announced" => {
                driver.begin_capture(stream.raw()).unwrap();
                let announced = stream.announce_capture().unwrap();
                ends();
                driver.destroy_graph(driver.end_capture(stream.raw()).unwrap()).unwrap();
                drop(announced);
            }
            _ => {
                let capture = first.begin_capture().unwrap();
                joins.record(&first).unwrap();
                stream.wait_event(&joins).unwrap();
                ends();
                joins.record(&stream).unwrap();
                first.wait_event(&joins).unwrap();
                drop(capture.end().unwrap());
            }
        }
        assert!(buffer.to_vec(&transfer).unwrap() == [3; BYTES], "{way}");
        assert_eq!(sim.take_violations(), [], "{way}");
    }
}

/// Runs a program with a buffer of old values and a stream under schedules that seeds fix.
fn under_schedules(program: fn(Transfer, Stream, Buffer<u8>)) {
    for seed in 0..20 {
        let body = move || {
            let (sim, transfer) = runtime(small().threads(1 + usize::from(seed % 2 == 0)));
            let stream = transfer.device().stream().unwrap();
            let buffer = transfer.allocator().alloc::<u8>(BYTES, &stream).unwrap();
            stream.fill(buffer.ptr(), 1, BYTES as u64).unwrap();
            program(transfer, stream, buffer);
            assert_eq!(sim.take_violations(), []);
        };
        executor::run(seed, 1_000_000, vec![Box::new(body)]).unwrap_or_else(|failure| panic!("{seed}: {failure}"));
    }
}

#[test]
fn waiting_for_a_stream_or_the_device_covers_what_threads_have_yet_to_enqueue() {
    under_schedules(|transfer, stream, mut buffer| {
        let own = transfer.device().per_thread_stream();
        for (nth, on) in [&stream, &stream, &own].into_iter().enumerate() {
            let wanted = content(BYTES, nth);
            drop(buffer.upload(wanted.clone(), &transfer.on(on).unwrap()).unwrap());
            if nth == 0 {
                transfer.device().synchronize().unwrap()
            } else {
                on.synchronize().unwrap()
            }
            assert!(on.is_idle().unwrap());
            // A bare copy, which knows of no reservation.
            let mut bytes = vec![0; BYTES];
            stream.download_blocking(&mut bytes, buffer.ptr()).unwrap();
            assert!(bytes == wanted, "{nth}");
        }
    });
}

/// The threads may all wait for access to the memory, and reach the upload only afterwards.
#[test]
fn a_thread_that_has_access_to_memory_waits_for_no_upload() {
    under_schedules(|transfer, stream, buffer| {
        let [side, other] = [(); 2].map(|()| transfer.device().stream().unwrap());
        let mut written = transfer.allocator().alloc::<u8>(BYTES, &other).unwrap();
        let downloads = [&stream, &side].map(|on| buffer.download(vec![0; BYTES], &transfer.on(on).unwrap()).unwrap());
        let mut waits = || {
            drop(written.upload(content(BYTES, 1), &transfer.on(&other).unwrap())?);
            other.synchronize()?;
            transfer.device().synchronize()?;
            Ok::<_, Error>(())
        };
        with(&stream, [read(&buffer)], |_, _| waits()).unwrap();
        downloads.into_iter().for_each(|download| assert!(download.wait().unwrap() == [1; BYTES]));
        assert!(written.to_vec(&transfer).unwrap() == content(BYTES, 1));
    });
}

#[test]
fn a_request_that_splits_frames_waits_for_no_upload() {
    let (_, transfer) = runtime_with(small(), "quarantine_mb:0,split_frames:on");
    let stream = transfer.device().stream().unwrap();
    let buffer = transfer.allocator().alloc::<u8>(BYTES, &stream).unwrap();
    let source = Arc::<Gate>::default();
    drop(upload(&transfer.on(&stream).unwrap(), &source, &buffer));
    let refused = transfer.allocator().alloc::<u8>(2 << 30, &stream).unwrap_err();
    assert!(refused.is_out_of_memory(), "{refused}");
    source.open();
    assert!(buffer.to_vec(&transfer).unwrap() == [3; BYTES]);
}

#[test]
fn an_upload_outlives_its_stream_its_runtime_and_a_sleep() {
    under_schedules(|transfer, stream, mut buffer| {
        let wanted = content(BYTES, 1);
        let allocator = transfer.allocator().clone();
        drop(buffer.upload(wanted.clone(), &transfer.on(&stream).unwrap()).unwrap());
        drop((transfer, stream));
        allocator.sleep(SleepOptions::all(Contents::SaveToHost).waiting(std::time::Duration::MAX)).unwrap();
        allocator.wake().unwrap();
        let reader = Transfer::new(&allocator).unwrap();
        assert!(buffer.to_vec(&reader).unwrap() == wanted);
    });
}

#[test]
fn a_failure_that_no_caller_asked_for_is_reported_by_the_next_access_once() {
    let (sim, transfer) = runtime(small());
    let stream = transfer.device().stream().unwrap();
    let buffer = transfer.allocator().alloc_zeros::<u8>(BYTES, &stream).unwrap();
    let failing = || {
        let source = Arc::new(Gate { fails: true, ..Gate::default() });
        source.open();
        upload(&transfer, &source, &buffer)
    };
    let readable = || buffer.to_vec(&transfer).map(drop);
    drop(failing());
    transfer.synchronize().unwrap();
    let error = readable().unwrap_err();
    assert!(matches!(error, Error::Alloc(AllocError::NotWritten { .. })), "{error}");
    assert!(error.to_string().contains("a test"), "{error}");
    readable().unwrap();

    let watched = failing();
    transfer.synchronize().unwrap();
    readable().unwrap();
    assert!(watched.wait().is_err());
    drop(watched);
    readable().unwrap();

    let source = Arc::<Gate>::default();
    let cancelled = upload(&transfer, &source, &buffer);
    cancelled.cancel();
    drop(cancelled);
    source.open();
    readable().unwrap();
    assert_eq!(sim.take_violations(), []);
}

#[test]
fn a_loss_of_the_device_during_a_dropped_upload_is_reported() {
    let (sim, transfer) = runtime(small());
    let stream = transfer.device().stream().unwrap();
    let buffer = transfer.allocator().alloc::<u8>(BYTES, &stream).unwrap();
    let source = Arc::<Gate>::default();
    drop(upload(&transfer.on(&stream).unwrap(), &source, &buffer));
    sim.inject(Fault::Nth { operation: Some(Operation::CopyToDevice), nth: 1, code: Code::ILLEGAL_ADDRESS });
    source.open();
    assert!(stream.synchronize().unwrap_err().is_device_lost());
    assert!(buffer.to_vec(&transfer).unwrap_err().is_device_lost());
}
