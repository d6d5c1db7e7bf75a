//! Pinned memory that graphs use: it stays theirs, and launches respect the borrows of the host.

use aquifer::Error;
use aquifer::device::sim::Fault;
use aquifer::prelude::*;
use aquifer::transfer::TransferError;
use aquifer_device::{Code, Operation};

use crate::graphs::Bench;

fn is_borrowed(launched: Result<(), Error>, call: &str) -> bool {
    let error = launched.expect_err("the host borrows the memory").to_string();
    error.contains("nothing was launched") && error.contains(call)
}

fn is_used(error: &TransferError) -> bool {
    matches!(error, TransferError::UsedByGraph { advice: "drop the graph first", .. })
}

#[test]
fn registered_memory_is_not_taken_back_while_a_graph_uses_it() {
    let bench = Bench::new();
    let Bench { memory, stream, .. } = &bench;
    let (x, mut y) = (bench.filled(1.0), bench.filled(0.0));
    let mut host = memory.transfer().unwrap().pinned().register(vec![0.0_f32; 1000]).unwrap();
    let writes = memory.graph(stream, |stream| x.download(&mut host, stream).map(drop)).unwrap();
    let reads = memory.graph(stream, |stream| y.upload(&host, stream).map(drop)).unwrap();
    let refused = host.into_vec().unwrap_err();
    assert!(is_used(&refused.error), "{}", refused.error);
    writes.launch(stream).unwrap();
    drop(writes);
    let refused = refused.memory.into_vec().unwrap_err();
    assert!(is_used(&refused.error) && refused.memory.refuse_graphs().is_err(), "the other graph reads it");
    bench.stall(stream);
    reads.launch(stream).unwrap();
    drop(reads);
    assert!(refused.memory.refuse_graphs().is_ok());
    assert_eq!(refused.memory.into_vec().unwrap(), [1.0; 1000], "waits for the launch");
    assert_eq!(y.to_vec(stream).unwrap(), [1.0; 1000]);
}

#[test]
fn memory_of_the_pool_stays_the_graphs_whatever_the_program_does_with_the_buffer() {
    let bench = Bench::new();
    let Bench { memory, stream, .. } = &bench;
    let give_up: [fn(PinnedBuffer<f32>); 2] = [drop, |host| assert_eq!(host.into_vec().unwrap(), [1.0; 1000])];
    for give_up in give_up {
        let x = bench.filled(1.0);
        let mut host = memory.pinned::<f32>(1000).unwrap();
        let graph = memory.graph(stream, |stream| x.download(&mut host, stream).map(drop)).unwrap();
        let address = host.read().unwrap().as_ptr();
        give_up(host);
        let others: Vec<_> = (0..100).map(|_| memory.pinned_from_slice(&[7.0_f32; 1000]).unwrap()).collect();
        graph.launch(stream).unwrap();
        stream.synchronize().unwrap();
        assert!(others.iter().all(|other| *other.read().unwrap() == [7.0; 1000]));
        drop((others, graph));
        assert_eq!(memory.pinned::<f32>(1000).unwrap().read().unwrap().as_ptr(), address, "it went back to the pool");
    }
}

#[test]
fn a_launch_that_conflicts_with_a_borrow_of_the_host_is_refused_until_it_ends() {
    let bench = Bench::new();
    let Bench { memory, stream, side, .. } = &bench;
    let (mut x, mut y) = (bench.filled(1.0), bench.filled(0.0));
    let reads = x.share();
    let mut host = memory.pinned::<f32>(1000).unwrap();
    let writer = memory.graph(stream, |stream| reads.download(&mut host, stream).map(drop)).unwrap();
    let reader = memory.graph(stream, |stream| y.upload(&host, stream).map(drop)).unwrap();
    x.fill(2.0, stream).unwrap();
    {
        let seen = host.read().unwrap();
        let also = host.slice(..1).as_bytes().read().unwrap();
        assert!(is_borrowed(writer.launch(stream), "`read`"));
        reader.launch(stream).unwrap();
        drop(seen);
        assert!(is_borrowed(writer.launch(side), "`read`"), "a part is read still");
        stream.synchronize().unwrap();
        assert_eq!(also, 1.0_f32.to_ne_bytes());
    }
    writer.launch(stream).unwrap();
    {
        let mut written = host.write().unwrap();
        assert_eq!(written[0], 2.0, "waits for the launch");
        assert!(is_borrowed(writer.launch(stream), "`write`"));
        assert!(is_borrowed(reader.launch(side), "`write`"));
        written.fill(3.0);
    }
    bench.stall(side);
    reader.launch(side).unwrap();
    assert!(!host.is_idle().unwrap());
    host.write().unwrap().fill(4.0); // waits for the launch
    assert_eq!(y.to_vec(stream).unwrap(), [3.0; 1000]);
    let (mut head, tail) = host.as_slice_mut().split_at(10).unwrap();
    let head = head.write().unwrap();
    assert!(is_borrowed(reader.launch(stream), "`write`"), "parts count as the whole");
    drop((head, tail));
    reader.launch(stream).unwrap();
    assert_eq!(y.to_vec(stream).unwrap(), [4.0; 1000]);
}

#[test]
fn launches_are_refused_once_a_borrow_was_forgotten() {
    let bench = Bench::new();
    let Bench { memory, stream, .. } = &bench;
    let x = bench.filled(1.0);
    let mut host = memory.pinned_from_slice(&[5.0_f32; 1000]).unwrap();
    std::mem::forget(host.write().unwrap());
    let graph = memory.graph(stream, |stream| x.download(&mut host, stream).map(drop)).unwrap();
    assert!(is_borrowed(graph.launch(stream), "`write`"));
    // Copies borrow the buffer, so they need no count.
    host.write().unwrap().fill(6.0);
    x.download(&mut host, stream).unwrap();
    let seen: &[f32] = host.read().unwrap().leak();
    assert_eq!(seen, [1.0; 1000]);
    assert!(is_borrowed(graph.launch(stream), "`write`"));
}

#[test]
fn a_borrow_ends_whatever_becomes_of_the_call() {
    let bench = Bench::new();
    let Bench { memory, stream, .. } = &bench;
    let x = bench.filled(1.0);
    let (mut host, mut to) = (memory.pinned::<f32>(1000).unwrap(), memory.pinned::<f32>(1000).unwrap());
    let graph = memory.graph(stream, |stream| x.download(&mut host, stream).map(drop)).unwrap();
    to.write().unwrap().copy_from_slice(&host.read().unwrap());
    host.write().unwrap().copy_from_slice(&to.read().unwrap());
    graph.launch(stream).unwrap();
    assert_eq!(host.read().unwrap(), [1.0; 1000]);
}

#[test]
fn parameters_are_updated_from_pinned_memory_that_is_written_again() {
    let bench = Bench::new();
    let Bench { memory, stream, .. } = &bench;
    let (mut token, mut y) = (bench.filled(0.0), bench.filled(0.0));
    let reads = token.share();
    let graph = memory.graph(stream, bench.adds(&reads, &mut y)).unwrap();
    let mut host = memory.pinned::<f32>(1000).unwrap();
    for value in [1.0, 10.0] {
        bench.stall(stream);
        host.write().unwrap().fill(value); // waits for the upload before
        graph.update(&mut token, &host, stream).unwrap();
        graph.launch(stream).unwrap();
        let _seen = host.read().unwrap(); // the graph does not use it
        graph.launch(stream).unwrap();
    }
    assert_eq!(y.to_vec(stream).unwrap(), [22.0; 1000]);
}

#[test]
fn tensors_in_pinned_memory_are_no_target_of_a_graph() {
    let bench = Bench::new();
    let Bench { memory, stream, .. } = &bench;
    let x = Tensor::zeros(&[1000], DType::F32, (memory, stream)).unwrap();
    let pool = memory.transfer().unwrap().pinned().clone();
    let failed = memory.graph(stream, |_| x.to(&pool)?.wait()).unwrap_err();
    assert!(failed.to_string().contains("cannot be captured"), "{failed}");
    let host = x.to(&pool).unwrap().wait().unwrap();
    let seen = host.as_slice::<f32>().unwrap();
    let graph = memory.graph(stream, |stream| host.to((memory, stream))?.wait()).unwrap();
    graph.launch(stream).unwrap(); // reads it, too
    assert_eq!(seen, graph.output().to_vec::<f32>().unwrap());
}

#[test]
fn a_copy_that_ends_a_capture_left_behind_is_one_of_the_stream() {
    let bench = Bench::new();
    let Bench { memory, stream, side, .. } = &bench;
    let (x, mut y) = (bench.filled(1.0), bench.filled(0.0));
    bench.stall(stream);
    for nth in 1..=6 {
        let fault = Fault::Nth { operation: Some(Operation::EndCapture), nth, code: Code(999) };
        bench.simulator().inject(fault);
    }
    memory.graph(stream, |stream| y.copy_from(&x, stream)).unwrap_err();
    assert!(stream.is_capturing(), "the driver did not end it");
    bench.simulator().clear_faults();
    // What the copy reads is the next one's only when it is done.
    let written = y.upload(vec![2.0; 1000], stream).unwrap();
    assert!(!stream.is_capturing() && !written.is_done().unwrap());
    let mut z = bench.filled(0.0);
    z.upload(vec![3.0; 1000], side).unwrap();
    assert_eq!(y.to_vec(stream).unwrap(), [2.0; 1000]);
    assert_eq!(z.to_vec(side).unwrap(), [3.0; 1000]);
}
