//! Tensors that are written in place, and files that are loaded into sets, on every driver.

use aquifer::Tensor;
use aquifer::kernels::DType;
use aquifer::tensor::{Checkpoint, Load, ParamSet, Place};

use super::Bench;

fn floats(count: usize, first: f32) -> Vec<f32> {
    (0..count).scan(first, |next, _| Some(std::mem::replace(next, *next + 1.0))).collect()
}

#[test]
fn views_are_written_in_place_and_other_elements_stay() {
    let bench = Bench::new();
    let streams = [&bench.stream, &bench.device.stream().unwrap()];
    let block = Tensor::zeros(&[300, 400], DType::F32, &bench.transfer).unwrap();
    let mut middle = block.narrow(0, 100..200).unwrap().narrow(1, 50..250).unwrap();
    let new = Tensor::from_vec(floats(100 * 200, 1.0), &[100, 200]).unwrap();
    // From the host, then half of it within the device, transposed, on another stream.
    middle.copy_from(&new, streams[0]).unwrap().wait().unwrap();
    let (left, right) = (middle.narrow(1, 0..100).unwrap(), middle.narrow(1, 100..200).unwrap());
    left.permute(&[1, 0]).unwrap().copy_from(&right.deep_copy().unwrap(), streams[1]).unwrap().wait().unwrap();
    block.narrow(0, 299..300).unwrap().fill(7.0f32, streams[0]).unwrap();
    let mut expected = vec![0.0; 300 * 400];
    for (row, column) in (0..100).flat_map(|row| (0..200).map(move |column| (row, column))) {
        let (from_row, from_column) = if column < 100 { (column, 100 + row) } else { (row, column) };
        expected[(100 + row) * 400 + 50 + column] =
            1.0 + f32::from(u16::try_from(from_row * 200 + from_column).unwrap());
    }
    expected[299 * 400..].fill(7.0);
    assert!(block.to_vec::<f32>().unwrap() == expected);
    drop((block, middle, left, right, new));
    bench.finish();
}

#[test]
fn a_file_is_loaded_into_a_set_where_its_tensors_are() {
    let bench = Bench::new();
    let path = std::env::temp_dir().join(format!("aquifer-set-{}.safetensors", std::process::id()));
    let shapes: [&[usize]; 3] = [&[700, 300], &[5], &[3, 2, 40]];
    let elements = |shape: &[usize], first| floats(shape.iter().product(), first);
    let (mut saved, mut set) = (ParamSet::new(), ParamSet::new());
    for (number, shape) in shapes.iter().enumerate() {
        let place = if number == 1 { Place::Host } else { Place::from(&bench.transfer) };
        saved.insert(format!("{number}"), Tensor::from_vec(elements(shape, 1.0), shape).unwrap()).unwrap();
        set.insert(format!("{number}"), Tensor::zeros(shape, DType::F32, place).unwrap()).unwrap();
    }
    saved.save_blocking(&path).unwrap();
    let seen = set.get("0").unwrap().clone();
    let loaded = Checkpoint::open(&path).unwrap().load_into_blocking(&mut set, Load::new());
    std::fs::remove_file(&path).unwrap();
    loaded.unwrap();
    for ((name, tensor), shape) in set.iter().zip(shapes) {
        assert!(tensor.to_vec::<f32>().unwrap() == elements(shape, 1.0), "{name}");
    }
    assert!(seen.shares_memory_with(set.get("0").unwrap()), "it was written where it is");
    drop((set, seen));
    bench.finish();
}
