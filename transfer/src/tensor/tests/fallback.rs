//! The host takes over where a device has no memory, if the caller wrote so.

use super::*;
use crate::pending::Pending;
use crate::placement::Fallback;
use aquifer_device::RequestError;

/// Silent CPU tensors: out of memory is an error, unless the caller wrote down that the host may
/// take it, and then the tensor says so.
#[test]
fn the_host_takes_over_only_where_the_caller_wrote_it() {
    let stand = stand_with(SimConfig::parse("64MiB").unwrap());
    let host = Tensor::zeros_in(Place::Host, DType::F32, &[32 << 20]).unwrap();
    let error = host.to(&stand.transfer).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    let to = To::new().dtype(DType::BF16).fallback(Fallback::Host);
    let here = Tensor::zeros_in(Place::Host, DType::F32, &[64 << 20])
        .unwrap()
        .to_with(&stand.transfer, to)
        .unwrap()
        .wait()
        .unwrap();
    assert!(here.place().is_host() && here.dtype() == DType::BF16);
    // What is no lack of memory is never hidden.
    let to = To::new().fallback(Fallback::Host).stream(stand_with(SimConfig::default()).device.default_stream());
    assert!(matches!(host.to_with(&stand.transfer, to), Err(TransferError::Request(RequestError::WrongDevice { .. }))));
}

/// Also where it runs out for what the device converts, after the elements were sent.
#[test]
fn the_host_takes_over_what_has_no_room_converted() {
    let stand = stand_with(SimConfig::parse("8MiB").unwrap());
    let host = Tensor::full(Place::Host, &[1 << 20], f16::ONE).unwrap();
    let to = To::new().dtype(DType::F64);
    assert!(host.to_with(&stand.transfer, to.clone()).and_then(Pending::wait).unwrap_err().is_out_of_memory());
    let here = host.to_with(&stand.transfer, to.fallback(Fallback::Host)).unwrap().wait().unwrap();
    assert!(here.place().is_host() && here.dtype() == DType::F64);
}

/// The device could have had it.
#[test]
fn the_host_takes_nothing_over_for_lack_of_page_locked_memory() {
    let stand = stand();
    stand.transfer.pinned().set_limit(Some(4096));
    let host = counting(&[1 << 20]);
    let sent = host.to_with(&stand.transfer, To::new().fallback(Fallback::Host)).and_then(Pending::wait);
    assert!(matches!(sent, Err(TransferError::OutOfPinned { .. })), "{sent:?}");
}
