//! Tensors against plain lists of numbers, and bugs of other libraries that cannot happen here.

mod fallback;
mod write;

use aquifer_allocator::Config;
use aquifer_device::{Code, Device, Operation, RequestError, Stream};
use aquifer_kernels::convert_host;
use aquifer_sim::{Fault, SimConfig, SimDriver};
use aquifer_transfer::Direction;
use half::{bf16, f16};
use proptest::prelude::*;

use super::*;
use crate::allocator::Allocator;
use crate::transfer::{Route, Transfer};

struct Stand {
    device: Device,
    transfer: Transfer,
    stream: Stream,
}

fn stand_with(config: SimConfig) -> Stand {
    let device = Device::new(SimDriver::new(config));
    let transfer = Transfer::new(&Allocator::new(&device, Config::default()).unwrap()).unwrap();
    let stream = device.stream().unwrap();
    Stand { device, transfer, stream }
}

fn stand() -> Stand {
    stand_with(SimConfig::default())
}

impl Stand {
    fn quiet(&self) {
        assert_eq!(self.device.driver().take_violation(), None);
    }

    /// Copies made so far, in all directions.
    fn copies(&self) -> u64 {
        let calls = self.device.driver_calls();
        [Operation::CopyToDevice, Operation::CopyToHost, Operation::CopyOnDevice, Operation::Launch]
            .iter()
            .map(|&operation| calls.of(operation))
            .sum()
    }
}

impl Drop for Stand {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.quiet();
        }
    }
}

fn counting(shape: &[usize]) -> Tensor {
    let len: usize = shape.iter().product();
    Tensor::from_vec((0..len).map(|n| n as f32).collect(), shape).unwrap()
}

/// The elements of a tensor of any dtype, as bytes in row-major order.
fn bytes(tensor: &Tensor) -> Vec<u8> {
    fn of<T: Element>(tensor: &Tensor) -> Vec<u8> {
        bytemuck::cast_slice(&tensor.to_vec::<T>().unwrap()).to_vec()
    }
    match tensor.dtype() {
        DType::U8 => of::<u8>(tensor),
        DType::I32 => of::<i32>(tensor),
        DType::U32 => of::<u32>(tensor),
        DType::I64 => of::<i64>(tensor),
        DType::U64 => of::<u64>(tensor),
        DType::F16 => of::<f16>(tensor),
        DType::BF16 => of::<bf16>(tensor),
        DType::F32 => of::<f32>(tensor),
        DType::F64 => of::<f64>(tensor),
        other => panic!("{other}"),
    }
}

fn converted(from: &[u8], from_dtype: DType, to: DType) -> Vec<u8> {
    let len = from.len() as u64 / from_dtype.bytes() * to.bytes();
    let mut bytes = vec![0; usize::try_from(len).unwrap()];
    convert_host(from, from_dtype, &mut bytes, to).unwrap();
    bytes
}

#[test]
fn a_copy_exists_only_if_something_changes() {
    let stand = stand();
    let host = counting(&[2, 3]);
    let on_host = host.to(Place::Host).unwrap().wait().unwrap();
    assert!(on_host.shares_memory_with(&host));
    assert_eq!(on_host.as_slice::<f32>().unwrap().as_ptr(), host.as_slice::<f32>().unwrap().as_ptr());
    assert!(host.cast(DType::F32, &stand.stream).unwrap().shares_memory_with(&host));
    let pinned = host.pin(stand.transfer.pinned()).unwrap().wait().unwrap();
    assert!(pinned.place().is_pinned() && !pinned.shares_memory_with(&host));
    for again in [pinned.pin(stand.transfer.pinned()), pinned.to(Place::Host)] {
        assert!(again.unwrap().wait().unwrap().shares_memory_with(&pinned));
    }
    let there = pinned.to(&stand.transfer).unwrap().wait().unwrap();
    let copies = (stand.copies(), stand.transfer.counters());
    let other_runtime = Transfer::new(stand.transfer.allocator()).unwrap();
    for again in [
        there.to(&stand.transfer),
        there.to(&other_runtime),
        there.to_with(&stand.transfer, To::new().dtype(DType::F32)),
    ] {
        assert!(again.unwrap().wait().unwrap().shares_memory_with(&there));
    }
    for view in [there.transpose(0, 1), there.reshape(&[6]), there.select(0, 1), there.contiguous()] {
        assert!(view.unwrap().shares_memory_with(&there));
    }
    assert_eq!(stand.copies(), copies.0);
    assert_eq!(there.to_vec::<f32>().unwrap(), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
}

#[test]
fn moves_keep_the_strides_of_tensors_without_gaps() {
    let stand = stand();
    let turned = counting(&[4, 5]).transpose(0, 1).unwrap();
    let repeated = counting(&[3, 1]).broadcast(&[3, 1000]).unwrap();
    for host in [&turned, &repeated] {
        let there = host.to(&stand.transfer).unwrap().wait().unwrap();
        assert_eq!(there.strides(), host.strides());
        assert_eq!(bytes(&there), bytes(host));
    }
    let there = repeated.to(&stand.transfer).unwrap().wait().unwrap();
    assert_eq!(there.memory.len(), 12, "repeated elements are sent once");
    let gaps = counting(&[10, 10]).narrow(1, 0..3).unwrap().to(&stand.transfer).unwrap().wait().unwrap();
    assert_eq!((gaps.strides(), gaps.memory.len()), (&[3, 1][..], 120));
}

#[test]
fn dtypes_are_converted_where_fewer_bytes_cross() {
    let stand = stand();
    let floats = counting(&[1 << 10]);
    let crossed = || {
        let counters = stand.transfer.counters();
        (counters.uploads.bytes, counters.downloads.bytes)
    };
    for (dtype, up, down) in
        [(DType::F16, 2048, 2048), (DType::U8, 1024, 1024), (DType::F64, 4096, 4096), (DType::I32, 4096, 4096)]
    {
        let before = crossed();
        let there = floats.to_with(&stand.transfer, To::new().dtype(dtype)).unwrap().wait().unwrap();
        assert_eq!((there.dtype(), crossed().0 - before.0), (dtype, up), "f32 up to {dtype}");
        let device = floats.to(&stand.transfer).unwrap().wait().unwrap();
        let before = crossed();
        let here = device.to_with(Place::Host, To::new().dtype(dtype)).unwrap().wait().unwrap();
        assert_eq!((here.dtype(), crossed().1 - before.1), (dtype, down), "f32 down to {dtype}");
        let expected = converted(&bytes(&floats), DType::F32, dtype);
        assert_eq!((bytes(&there), bytes(&here)), (expected.clone(), expected));
    }
}

/// PyTorch's `.to("cpu", non_blocking=True)` gives memory that is read before the copy wrote it.
/// Here there is no tensor to read before the copy is complete, or its memory waits.
#[test]
fn to_host_without_blocking_never_reads_garbage_86264() {
    let stand = stand();
    let kernels = stand.transfer.allocator().kernels().unwrap();
    for seed in 0..20u32 {
        let mut x = Tensor::full(&[1000], 0u32, &stand.transfer).unwrap();
        kernels.spin(&stand.stream, std::time::Duration::from_millis(2)).unwrap();
        x.fill(seed + 1, &stand.stream).unwrap();
        let pending = x.to(stand.transfer.pinned()).unwrap();
        let to_host = x.to_host().unwrap();
        // Chained without waiting: the tensor's own memory waits when it is read.
        let early = pending.then(&stand.stream, |_, tensor| tensor).unwrap();
        assert!(early.as_slice::<u32>().unwrap().iter().all(|&n| n == seed + 1));
        assert!(to_host.wait().unwrap().as_slice::<u32>().unwrap().iter().all(|&n| n == seed + 1));
    }
}

/// Sources of uploads are overwritten or dropped while the copy is in flight.
#[test]
fn sources_dropped_in_flight_arrive_intact_130785_sglang_16493() {
    let stand = stand();
    let pool = stand.transfer.pinned();
    let mut there = Vec::new();
    for seed in 0..20u32 {
        let pinned = Tensor::full(&[5000], seed, pool).unwrap();
        there.push(pinned.to(&stand.transfer).unwrap());
        drop(pinned);
        // The pool must not hand the memory out again before the copy is done.
        drop(Tensor::full(&[5000], u32::MAX, pool).unwrap());
    }
    for (seed, tensor) in (0..).zip(there) {
        assert!(tensor.wait().unwrap().to_vec::<u32>().unwrap().iter().all(|&n| n == seed));
    }
}

#[test]
fn mixed_devices_dtypes_and_shapes_are_errors_that_name_every_operand() {
    let stands = [stand(), stand_with(SimConfig::default().ordinal(1)), stand()];
    let on = |index: usize, tensor: &Tensor| tensor.to(&stands[index].transfer).unwrap().wait().unwrap();
    let (host, stream) = (counting(&[2, 3]), &stands[0].stream);
    let (here, there, again) = (on(0, &host), on(1, &host), on(2, &host));
    let half = here.cast(DType::F16, stream).unwrap();
    let turned = here.transpose(0, 1).unwrap();
    let cases = [
        (here.add(&there, stream), ["one device", "a: f32 [2, 3] on sim:0", "b: f32 [2, 3] on sim:1"]),
        (here.add(&host, stream), ["one device", "a: f32 [2, 3] on sim:0", "b: f32 [2, 3] on cpu"]),
        (here.add(&again, stream), ["one operand is on sim:0", "as opened later", "instead of opening it twice"]),
        (host.add(&here, stream), ["computes on devices", "a: f32 [2, 3] on cpu", "b: f32 [2, 3] on sim:0"]),
        (here.add(&half, stream), ["one dtype", "a: f32 [2, 3] on sim:0", "b: f16 [2, 3] on sim:0"]),
        (here.add(&turned, stream), ["one shape", "a: f32 [2, 3] on sim:0", "b: f32 [3, 2] on sim:0"]),
        (here.matmul(&here, stream), ["3 columns and b 2 rows", "a: f32 [2, 3]", "b: f32 [2, 3]"]),
        (here.add_scaled(2.0, &half, stream), ["one dtype", "y: f32 [2, 3]", "x: f16 [2, 3]"]),
        (host.sum(stream), ["computes on devices", "a: f32 [2, 3] on cpu", "Tensor::to"]),
    ];
    for (result, parts) in cases {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Operands { .. }), "{error:?}");
        for part in parts {
            assert!(error.to_string().contains(part), "{part:?}: {error}");
        }
    }
    assert!(matches!(there.sum(stream), Err(Error::Request(RequestError::WrongDevice { what: "stream", .. }))));
    // The tensors still work.
    assert_eq!(here.sum(stream).unwrap().item::<f32>().unwrap(), 15.0);
}

#[test]
fn operations_compute_the_documented_results() {
    let stand = stand();
    let (stream, transfer) = (&stand.stream, &stand.transfer);
    let a = counting(&[2, 3]).to(transfer).unwrap().wait().unwrap();
    let b = a.transpose(0, 1).unwrap();
    assert_eq!(a.matmul(&b, stream).unwrap().to_vec::<f32>().unwrap(), [5.0, 14.0, 14.0, 50.0]);
    assert_eq!(b.add(&b, stream).unwrap().to_vec::<f32>().unwrap(), [0.0, 6.0, 2.0, 8.0, 4.0, 10.0]);
    let scaled = a.add_scaled(10.0, &a, stream).unwrap();
    assert_eq!(scaled.to_vec::<f32>().unwrap(), [0.0, 11.0, 22.0, 33.0, 44.0, 55.0]);
    let row = a.select(0, 1).unwrap();
    assert!(a.add(&row, stream).is_err(), "repeated only where it is asked for");
    let sum = a.add(&row.broadcast(&[2, 3]).unwrap(), stream).unwrap();
    assert_eq!(sum.to_vec::<f32>().unwrap(), [3.0, 5.0, 7.0, 6.0, 8.0, 10.0]);
    assert!(matches!(a.item::<f32>(), Err(Error::NotOneElement { .. })));
    let mut shared = a.clone();
    shared.fill(7.0f32, stream).unwrap();
    assert_eq!(a.to_vec::<f32>().unwrap(), [7.0; 6]);
    assert!(matches!(shared.fill(7i32, stream), Err(Error::WrongDType { .. })));
}

#[test]
fn tensors_go_between_devices_and_neither_side_races() {
    let stands = [stand(), stand_with(SimConfig::default().ordinal(1))];
    assert_eq!(stands[1].transfer.route_from(&stands[0].transfer).unwrap(), Route::Peer);
    let host = counting(&[100, 50]);
    for dtype in [DType::F32, DType::F16, DType::F64] {
        let mut here = host.to(&stands[0].transfer).unwrap().wait().unwrap();
        let part = here.narrow(1, 10..30).unwrap();
        let to = To::new().dtype(dtype).stream(&stands[1].stream);
        let there = part.to_with(&stands[1].transfer, to).unwrap().then(&stands[1].stream, |_, tensor| tensor).unwrap();
        // A stream that is not ordered after the copy overwrites the source at once.
        here.fill(-1.0f32, &stands[0].stream).unwrap();
        drop((here, part));
        assert_eq!(there.place().device().unwrap().id(), stands[1].device.id());
        assert_eq!(bytes(&there), converted(&bytes(&host.narrow(1, 10..30).unwrap()), DType::F32, dtype), "{dtype}");
    }
}

#[test]
fn tensors_of_several_elements_are_not_items() {
    let stand = stand();
    let there = counting(&[1000]).to(&stand.transfer).unwrap().wait().unwrap();
    for tensor in [there.narrow(0, 0..0), there.narrow(0, 0..1).and_then(|one| one.broadcast(&[1 << 60])), Ok(there)] {
        assert!(matches!(tensor.unwrap().item::<f32>(), Err(Error::NotOneElement { .. })));
    }
    assert_eq!(stand.transfer.counters().downloads.bytes, 0);
}

/// Copies back do not wait for other uploads on the stream that brought the tensor.
#[test]
fn a_moved_tensor_is_not_bound_to_its_stream() {
    let stand = stand();
    let host = counting(&[100]);
    for dtype in [DType::F32, DType::F64] {
        for to in [To::new(), To::new().stream(&stand.stream)] {
            let there = host.to_with(&stand.transfer, to.clone().dtype(dtype)).unwrap().wait().unwrap();
            let other = there.to_with(&stand.transfer, to.dtype(DType::I32)).unwrap().wait().unwrap();
            for tensor in [there, other] {
                let Place::Device(transfer) = tensor.place() else { panic!("{tensor:?}") };
                let used = |direction| [(); 2].map(|()| transfer.next_stream(direction).id());
                assert!(used(Direction::Download).iter().all(|id| !used(Direction::Upload).contains(id)), "{tensor:?}");
            }
        }
    }
}

#[test]
fn a_failed_move_leaves_everything_as_it_was() {
    for call in 1..12 {
        let driver = SimDriver::new(SimConfig::default().jitter(false));
        let device = Device::new(driver.clone());
        let allocator = Allocator::new(&device, Config::default()).unwrap();
        let transfer = Transfer::new(&allocator).unwrap();
        let host = counting(&[64, 64]).narrow(1, 0..32).unwrap();
        transfer.allocator().kernels().unwrap();
        driver.inject(Fault::Nth { operation: None, nth: call, code: Code::OUT_OF_MEMORY });
        let moved = host.to_with(&transfer, To::new().dtype(DType::F64)).and_then(|pending| pending.wait());
        driver.clear_faults();
        if let Ok(moved) = &moved {
            assert_eq!(bytes(moved), converted(&bytes(&host), DType::F32, DType::F64), "call {call}");
        }
        drop(moved);
        let again = host.to(&transfer).unwrap().wait().unwrap();
        assert_eq!(bytes(&again), bytes(&host), "call {call}");
        drop(again);
        device.synchronize().unwrap();
        assert_eq!(allocator.memory_allocated(), 0, "call {call}");
        assert_eq!(device.driver().take_violation(), None, "call {call}");
    }
}

#[test]
fn memory_and_shape_must_fit() {
    let stand = stand();
    assert!(matches!(Tensor::from_slice(&[1u8, 2], &[3]), Err(Error::Layout(_))));
    assert!(matches!(counting(&[2]).as_slice::<i32>(), Err(Error::WrongDType { .. })));
    let turned = counting(&[2, 2]).transpose(0, 1).unwrap();
    assert!(matches!(turned.as_slice::<f32>(), Err(Error::NotContiguous { .. })));
    let there = turned.to(&stand.transfer).unwrap().wait().unwrap();
    assert!(matches!(there.as_slice::<f32>(), Err(Error::NotOnHost { .. })));
    assert!(matches!(turned.device_buffer::<f32>(), Err(Error::NotOnDevice { .. })));
    let buffer = there.contiguous().unwrap().device_buffer::<f32>().unwrap();
    let again = Tensor::from_buffer(&buffer, &[4]).unwrap();
    assert_eq!(again.to_vec::<f32>().unwrap(), [0.0, 2.0, 1.0, 3.0]);
    assert!(Tensor::empty(&[usize::MAX / 4], DType::F64, Place::Host).is_err());
    assert!(Tensor::empty(&[usize::MAX / 4], DType::F64, &stand.transfer).is_err());
    for place in [Place::Host, Place::from(&stand.transfer), Place::from(stand.transfer.pinned())] {
        let empty = Tensor::zeros(&[3, 0], DType::F32, &place).unwrap();
        for to in [Place::Host, Place::from(&stand.transfer), Place::from(stand.transfer.pinned())] {
            let moved = empty.to_with(&to, To::new().dtype(DType::F16)).unwrap().wait().unwrap();
            assert_eq!(moved.to_vec::<f16>().unwrap(), []);
        }
        let scalar = Tensor::full(&[], 3u8, &place).unwrap();
        assert_eq!(scalar.item::<u8>().unwrap(), 3);
        let twos = Tensor::full(&[3, 2], bf16::from_f32(2.0), &place).unwrap();
        assert_eq!((twos.dtype(), bytes(&twos)), (DType::BF16, bf16::from_f32(2.0).to_le_bytes().repeat(6)));
        assert!(twos.place().serves_as(&place) && place.serves_as(&twos.place()), "{twos:?}");
    }
}

/// A step of a program of moves and views.
#[derive(Clone, Debug)]
enum Step {
    Transpose(usize, usize),
    Narrow(usize, usize, usize),
    Broadcast(usize),
    Contiguous,
    Move(u8, Option<DType>),
    Reshape,
}

fn step() -> impl Strategy<Value = Step> {
    let dtype = prop::option::of(prop::sample::select(DType::ALL));
    prop_oneof![
        1 => (0usize..4, 0usize..4).prop_map(|(a, b)| Step::Transpose(a, b)),
        1 => (0usize..4, 0usize..9, 0usize..9).prop_map(|(dimension, start, end)| Step::Narrow(dimension, start, end)),
        1 => (1usize..4).prop_map(Step::Broadcast),
        1 => Just(Step::Contiguous),
        1 => Just(Step::Reshape),
        3 => (0u8..4, dtype).prop_map(|(place, dtype)| Step::Move(place, dtype)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Moves and views give the same elements as host views, with dtypes converted one after the
    /// other.
    #[test]
    fn programs_of_moves_and_views_keep_every_element(
        shape in prop::collection::vec(0usize..7, 0..4), wide in any::<bool>(), steps in prop::collection::vec(step(), 0..10),
        seed in 0u64..1000,
    ) {
        let stands = [stand_with(SimConfig::default().seed(seed)), stand_with(SimConfig::default().seed(seed).ordinal(1))];
        let mut shape = shape;
        if wide {
            shape.push(200); // rows that the copy engine takes
        }
        let mut tensor = counting(&shape);
        // The model: places in a list of bytes, by host views alone.
        let (mut elements, mut layout) = (bytes(&tensor), *tensor.layout());
        let packed = |elements: &[u8], layout: &Layout, dtype: DType| {
            let mut dense = vec![0; layout.len() * usize::try_from(dtype.bytes()).unwrap()];
            pack::pack_on_host(elements, layout, usize::try_from(dtype.bytes()).unwrap(), &mut dense);
            dense
        };
        for step in steps {
            let viewed = match step {
                Step::Transpose(a, b) => (tensor.transpose(a, b), layout.transpose(a, b)),
                Step::Narrow(dimension, start, end) => (tensor.narrow(dimension, start..end), layout.narrow(dimension, start..end)),
                Step::Broadcast(times) => {
                    let mut to = vec![times];
                    to.extend(layout.shape());
                    if layout.rank() > 5 || layout.len() * times > 50_000 {
                        continue;
                    }
                    (tensor.broadcast(&to), layout.broadcast(&to))
                }
                Step::Reshape => {
                    let flat = [layout.len()];
                    let contiguous = tensor.contiguous().unwrap();
                    elements = packed(&elements, &layout, tensor.dtype());
                    (contiguous.reshape(&flat), Layout::row_major(&flat))
                }
                Step::Contiguous => {
                    tensor = tensor.contiguous().unwrap();
                    prop_assert!(tensor.is_contiguous());
                    continue;
                }
                Step::Move(place, dtype) => {
                    let place = match place {
                        0 => Place::Host,
                        1 => Place::from(stands[0].transfer.pinned()),
                        place => Place::from(&stands[usize::from(place) - 2].transfer),
                    };
                    let to = dtype.unwrap_or(tensor.dtype());
                    let dense = packed(&elements, &layout, tensor.dtype());
                    elements = converted(&dense, tensor.dtype(), to);
                    layout = Layout::row_major(layout.shape()).unwrap();
                    let pending = tensor.to_with(&place, To::new().dtype(to)).unwrap();
                    tensor = if seed % 2 == 0 { pending.wait().unwrap() } else { pollster::block_on(pending).unwrap() };
                    prop_assert!(tensor.place().serves_as(&place));
                    continue;
                }
            };
            match viewed {
                (Ok(view), Ok(of_model)) => (tensor, layout) = (view, of_model),
                (Err(_), Err(_)) => {}
                (tensor, layout) => panic!("{tensor:?} {layout:?}"),
            }
            prop_assert_eq!(tensor.shape(), layout.shape());
        }
        prop_assert_eq!(bytes(&tensor), packed(&elements, &layout, tensor.dtype()));
        for stand in &stands {
            stand.quiet();
        }
    }
}
