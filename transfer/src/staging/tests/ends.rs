//! Ends that are not what they said.

use super::*;

/// Lends so many bytes for some calls, and then so many.
struct Fickle {
    bytes: Vec<u8>,
    asked: std::sync::atomic::AtomicUsize,
    calls: usize,
    lens: [usize; 2],
}

impl Fickle {
    fn new(calls: usize, lens: [usize; 2]) -> Fickle {
        Fickle { bytes: vec![7; lens[0].max(lens[1])], asked: Default::default(), calls, lens }
    }
}

impl AsRef<[u8]> for Fickle {
    fn as_ref(&self) -> &[u8] {
        let asked = self.asked.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        &self.bytes[..self.lens[usize::from(asked >= self.calls)]]
    }
}

/// Safe code may lend another length each time it is asked. What was not meant is never written.
#[test]
fn an_owner_that_changes_its_mind_writes_nothing_else() {
    const HALF: usize = 400_000;
    for later in [2 * HALF, HALF - 1] {
        for calls in 0..12 {
            let (_, transfer) = runtime(SMALL);
            let stream = transfer.device().create_stream().unwrap();
            let mut both = transfer.to_device(vec![0u8; 2 * HALF], &stream).unwrap().wait().unwrap();
            let mut half = both.slice(0..HALF as u64).unwrap();
            let uploaded = transfer.upload_from(Fickle::new(calls, [HALF, later]), &mut half);
            let uploaded = uploaded.and_then(Pending::wait);
            let bytes = transfer.to_vec(&both).unwrap().wait().unwrap();
            assert!(bytes[HALF..].iter().all(|&byte| byte == 0), "{calls} calls, then {later}: {uploaded:?}");
            match uploaded {
                Ok(()) => assert!(bytes[..HALF].iter().all(|&byte| byte == 7), "{calls} calls, then {later}"),
                Err(error) => assert!(matches!(error, TransferError::LengthMismatch { .. }), "{error}"),
            }
            transfer.fill(&mut both, 0).unwrap().wait().unwrap();
            let tensor = crate::Tensor::from_owner::<u8, _>(Fickle::new(calls, [HALF, later]), &[HALF as u64]);
            let sent = tensor.and_then(|tensor| tensor.to(&transfer)).and_then(Pending::wait);
            if let Ok(sent) = sent {
                assert_eq!(sent.to_vec_blocking::<u8>().unwrap(), [7; HALF]);
            }
        }
    }
}

/// Where the host's end is longer or shorter than the device's, nothing is copied.
#[test]
fn ends_of_different_lengths_are_refused() {
    let world = World::new(sim());
    let stream = world.device.create_stream().unwrap();
    let buffer = world.buffer(2000, &stream);
    let half = buffer.slice(0..1000).unwrap();
    for bytes in [999, 1001, 2000] {
        let refused = world.upload(Memory::new(vec![1; bytes]), &half, &stream);
        assert!(matches!(refused, Err(TransferError::LengthMismatch { .. })), "{refused:?}");
        let refused = world.download(&half, Memory::new(vec![1; bytes]), &stream);
        assert!(matches!(refused, Err(TransferError::LengthMismatch { .. })), "{refused:?}");
    }
    world.end();
}
